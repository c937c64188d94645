"""A Flower app: arrays from the server to a client and back. Writes the seconds of each turn as JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

SIZES = {"1 MB": 250_000, "100 MB": 25_000_000}
client = ClientApp()
server = ServerApp()


@client.train()
def echo(message: Message, _: Context) -> Message:
    return Message(content=message.content, reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    while not (nodes := list(grid.get_node_ids())):
        time.sleep(0.1)
    found: dict[str, list[float]] = {}
    for _ in range(int(context.run_config["turns"])):
        for name, size in SIZES.items():
            content = RecordDict({"arrays": ArrayRecord(numpy_ndarrays=[np.ones(size, np.float32)])})
            start = time.perf_counter()
            (reply,) = grid.send_and_receive([Message(content, dst_node_id=nodes[0], message_type="train")])
            (back,) = reply.content["arrays"].to_numpy_ndarrays()
            found.setdefault(name, []).append(time.perf_counter() - start)
            assert back.size == size
    Path(context.run_config["out"]).write_text(json.dumps(found), encoding="utf-8")
