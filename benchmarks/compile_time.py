"""How compile time grows with depth: equal layers, a process and empty caches for each depth.

``python -m fusewright.benchmarks.compile_time MODEL --layers 8 32 80 --output FILE``
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..bench.environment import environment


def compile_once(model: Path, layers: int, level: int, device: str) -> dict[str, Any]:
    """Compile ``model`` with another number of layers into an empty store; seconds by phase."""
    from ..config import EngineOptions
    from ..engine.aot_compile import aot_compile

    with tempfile.TemporaryDirectory(prefix="fusewright-bench-") as folder:
        config = json.loads((model / "config.json").read_text()) | {"num_hidden_layers": layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        options = EngineOptions(
            model=folder,
            load_format="dummy",
            optimization_level=level,
            device=device,
            compile_cache_dir=(f"{folder}/store",),
        )
        (result,) = aot_compile(options)
    report = result.compiled.report
    return {
        "layers": layers,
        "seconds": dict(result.compiled.seconds),
        "whole_s": result.startup.seconds["compile"],
        "pieces": len(report["pieces"]),
        "steps": report["steps"],
        "kernels": report["kernels"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", type=Path)
    parser.add_argument("-O", dest="level", type=int, default=2)
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 80])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(compile_once(args.model, args.layers[0], args.level, args.device)))
        return
    rows = []
    for layers in args.layers:
        command = [sys.executable, "-m", "fusewright.benchmarks.compile_time", str(args.model)]
        command += ["-O", str(args.level), "--layers", str(layers), "--device", args.device]
        with tempfile.TemporaryDirectory(prefix="fusewright-bench-") as scratch:
            names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
            env = os.environ | {name: f"{scratch}/{name}" for name in names}
            done = subprocess.run(
                [*command, "--child"], env=env, capture_output=True, text=True, check=False
            )
        if done.returncode:
            sys.exit(done.stderr)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        phases = ", ".join(f"{name} {s:.3f}" for name, s in rows[-1]["seconds"].items())
        print(f"{layers} layers: {rows[-1]['whole_s']:.2f} s ({phases})", flush=True)
    if args.output:
        record = {"environment": environment(), "rows": rows}
        args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
