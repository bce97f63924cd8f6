"""``python -m econv.train``, for `torchrun` among others."""

import argparse
import sys

from econv import train

if __name__ == "__main__":
    summary = (train.__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m econv.train", description=summary)
    train.add_arguments(parser)
    sys.exit(train.main(parser.parse_args()))
