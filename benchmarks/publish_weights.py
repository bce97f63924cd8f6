"""Finished runs → `weights/`: one folder for each recipe, from its first seed.

    econv train NAME --output outputs --records records            where the GPU is
    python benchmarks/publish_weights.py --outputs outputs         anywhere, with the records beside

A run leaves ``outputs/NAME/SEED/model.safetensors``; nothing is trained here. ``econv train
NAME --weights weights`` does both at once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from econv import data, records, train

LARGEST = 30_000_000
"""Bytes of all weights together, which everybody clones."""


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("names", nargs="*", metavar="RECIPE", help="all that outputs has, by default")
    add("--outputs", type=Path, default=Path("outputs"), metavar="FOLDER")
    add("--records", type=Path, default=Path("records"), metavar="FOLDER")
    add("--weights", type=Path, default=Path("weights"), metavar="FOLDER")
    add("--seed", type=int, default=0)
    add("--data-seed", type=int, default=0, help="of runs on images that were made again")
    add("--root", type=Path, help="where downloaded data are kept")
    add("--source", type=Path, help="a folder or .npz with the data")
    add("--device")
    options = parser.parse_args()
    run = records.run_name(options.seed, options.data_seed)
    there = sorted(p.parent.parent.name for p in options.outputs.glob(f"*/{run}/model.*"))
    for name in options.names or there:
        try:
            place = records.path_of(options.records, name, options.seed, options.data_seed)
            record = records.load(place)
            found = data.load(
                record.dataset,
                root=options.root,
                source=options.source,
                seed=options.data_seed,
                recreated=record.recreated and not record.dataset.endswith("_recreated"),
            )
            made = train.publish(
                record,
                options.outputs / name / run,
                found,
                options.records,
                options.weights,
                options.device,
            )
        except (train.TrainingError, ValueError, OSError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        print(f"{made.folder}: {made.dtype}, test error {record.test_error:.2f} %")
    total = size_of(options.weights)
    print(f"{options.weights}: {total / 1e6:.1f} MB of {LARGEST / 1e6:.0f}")
    return int(total > LARGEST)


if __name__ == "__main__":
    sys.exit(main())
