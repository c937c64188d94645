"""Ask a process over gRPC whether it serves: python -m edgefl.runtimes.grpc.probe HOST:PORT

Exit code 0 when it does, 1 when it does not or does not answer. For health checks of containers: it needs
no other program, and imports no PyTorch.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

TIMEOUT_S = 4.0


def probe(address: str, timeout_s: float = TIMEOUT_S) -> str:
    """The state of the process that serves at "host:port", "SERVING" when it is well, or what went wrong."""
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=timeout_s, wait_for_ready=True
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))


if __name__ == "__main__":
    state = probe(sys.argv[1])
    print(state)
    sys.exit(state != "SERVING")
