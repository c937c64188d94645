#!/bin/sh
# Install edgefl as a service on this device, and start it: sudo clients/install.sh CLASS FLEET ID
#
# CLASS: raspberry-pi, jetson or laptop. FLEET: the fleet file; its experiment is copied along. ID: which of
# its nodes this device is. PYTHON names another Python, PIP_FLAGS adds to pip (a mirror, a folder of wheels).
set -eu

here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
prefix=${PREFIX:-/opt/edgefl}
settings=${SETTINGS:-/etc/edgefl}
units=${UNITS:-/etc/systemd/system}

[ $# -eq 3 ] && [ -d "$here/$1" ] && [ -f "$2" ] || { sed -n '2,5s/^# //p' "$0" >&2; exit 2; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11) or sys.maxsize < 2**32)' ||
  { echo "Python 3.11 or newer and a 64-bit system are needed; name one with PYTHON=..." >&2; exit 2; }

"$python" -m venv ${VENV_FLAGS:-} "$prefix"
"$prefix/bin/pip" install --quiet ${PIP_FLAGS:-} "$here/..[data]"

mkdir -p "$settings" "$units"
"$prefix/bin/python" - "$2" "$settings" <<'PYTHON'
"""Copy a fleet file and its experiment side by side."""
import re, shutil, sys
from pathlib import Path
from edgefl.runtimes.grpc.place import read_fleet

source, folder = Path(sys.argv[1]), Path(sys.argv[2])
shutil.copy(read_fleet(source).experiment, folder / "experiment.toml")
text = re.sub(r"(?m)^experiment *=.*$", 'experiment = "experiment.toml"', source.read_text())
(folder / "fleet.toml").write_text(text)
PYTHON
{ cat "$here/$1/device.env"; echo "EDGEFL_NODE=$3"; } >"$settings/device.env"
cp "$here/$1/edgefl.service" "$units/edgefl.service"
${SYSTEMCTL:-systemctl} daemon-reload
${SYSTEMCTL:-systemctl} enable --now edgefl.service
echo "node $3 is started; watch it with: journalctl -fu edgefl"
