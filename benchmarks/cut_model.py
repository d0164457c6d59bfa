"""No measurement: makes a smaller model of the first layers of another, for trials on the CPU (docs/plan-results.md).

    python benchmarks/cut_model.py --model smollm2-135m-instruct --layers 3 --output-dir .

writes smollm2-135m-instruct-3-layers. The folder links to the files of the other model, which must stay where it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.workload import model_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Make the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="built-in, or a folder")
    parser.add_argument("--layers", type=int, required=True, help="how many of its layers are kept")
    parser.add_argument("--output-dir", type=Path, default=Path(), help="where the folder of the smaller model is made")
    options = parser.parse_args(argv)
    if options.layers < 1:
        parser.error("--layers: a model keeps at least one layer")
    print(model_folder(options.model, options.output_dir, layers=options.layers))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
