#!/usr/bin/env bash
# Unpacks peers that travelled as wheels, on a machine with no package index.
#
#     export PYTHONPATH="$(bench/peers.sh .whl)"
#     bench/peers.sh .fa4a; export PYTHONPATH="$(bench/peers.sh .whl .fa4b)"
#
# Each folder may hold wheels, and parts of a tar.xz named NAME.tar.xz.<number>of<count> (numbers from
# 00): a part waits under $PARTS until all are there, in this call or a later one. Prints the
# PYTHONPATH that has them all. SITE and PARTS may be set.
#
# Wheels are unpacked, not installed: several fill one folder (nvidia_cutlass_dsl), which
# `pip install --target` replaces. CuTe's packages lie deeper, where only a .pth file would lead.
set -euo pipefail
SITE="${SITE:-/tmp/site}"
PARTS="${PARTS:-/tmp/peer-parts}"
mkdir -p "$SITE" "$PARTS"

for folder in "$@"; do
    for part in "$folder"/*.tar.xz.*of*; do
        [ -e "$part" ] && cp "$part" "$PARTS/"
    done
done

python3 - "$SITE" "$PARTS" "$@" >&2 <<'PYTHON'
import io, pathlib, re, sys, tarfile, zipfile

site, parts, *folders = map(pathlib.Path, sys.argv[1:])
for folder in folders:
    for wheel in sorted(folder.glob("*.whl")):
        zipfile.ZipFile(wheel).extractall(site)
        print(f"unpacked {wheel.name}")
names = {}
for path in parts.iterdir():
    name, number, count = re.fullmatch(r"(.*)\.(\d+)of(\d+)", path.name).groups()
    names.setdefault((name, int(count)), {})[int(number)] = path
for (name, count), found in names.items():
    missing = [n for n in range(count) if n not in found]
    if missing:
        print(f"{name}: waiting for {len(missing)} of {count} parts")
        continue
    if (site / f".{name}").exists():
        continue
    whole = io.BytesIO(b"".join(found[n].read_bytes() for n in range(count)))
    tarfile.open(fileobj=whole, mode="r:xz").extractall(site, filter="data")
    (site / f".{name}").touch()
    print(f"unpacked {name}")
# tokamax imports its own benchmark's profiler, which no call here uses.
stub = site / "xprof" / "cli" / "tools"
if not stub.exists():
    stub.mkdir(parents=True)
    for folder in (stub, stub.parent, stub.parent.parent):
        (folder / "__init__.py").touch()
    (stub / "get_kernel_stats_tool.py").touch()
PYTHON

echo "$SITE:$SITE/nvidia_cutlass_dsl/dsl_packages${PYTHONPATH:+:$PYTHONPATH}"
