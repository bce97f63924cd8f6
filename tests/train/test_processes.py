"""Two processes train as one, and a lost one is named."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from econv import records
from econv.train.processes import Processes
from econv.train.trainer import Trainer
from tiny_training import EXECUTION, TINY, changed, losses, start, stripes, weights

WORKER = """
import gc, json, os, signal, sys
import torch
from pathlib import Path
torch.set_num_threads(1)
sys.path[:0] = {tests!r}
import test_processes
from econv import train
from econv.train.trainer import Trainer
HOLDERS = ("DistributedDataParallel", "ProcessGroupGloo")  # of what must not outlive Python
folder, precision, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
rank = int(os.environ["RANK"])
if kill_at and rank == 1:
    original = Trainer.step
    done = [0]
    def step(self):
        done[0] += 1
        if done[0] == kill_at:
            (folder / "lost").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        original(self)
    Trainer.step = step
try:
    record = test_processes.start(folder, test_processes.PAIR, precision=precision)
except train.TrainingError as error:
    print(f"{{type(error).__name__}}: {{error}}", file=sys.stderr, flush=True)
    os._exit(3)
if rank == 0:
    (folder / "done").write_text(str(record.processes))
train.leave()
left = [type(o).__name__ for o in gc.get_objects() if type(o).__name__ in HOLDERS]
assert not left, left
"""

ELASTIC = """
import os, signal, sys
import torch
from pathlib import Path
torch.set_num_threads(1)
sys.path[:0] = {tests!r}
import test_processes
from econv.cli import main
from econv.recipes import RECIPES
from econv.train import runs
from econv.train.checkpoints import Checkpoints
from econv.train.trainer import Trainer
from tiny_training import stripes
RECIPES["pair"] = test_processes.PAIR
runs.load = lambda name, **_: stripes()
folder, kill = Path(sys.argv[1]), sys.argv[2] == "kill"
if kill and os.environ["RANK"] == "1":
    original, marker = Trainer.step, folder / "killed"
    def step(self):
        if not marker.exists() and (folder / "out" / "pair" / "0" / "checkpoint.json").exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        original(self)
    Trainer.step = step
places = ["--output", str(folder / "out"), "--records", str(folder / "records")]
sys.exit(main(["train", "pair", "--device", "cpu", "--checkpoint-every", "1", *places]))
"""

PAIR = changed(name="pair", epochs=5, augmentation=(("rotate", True),))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def pair(folder: Path, precision: str, kill_at: int = 0) -> list[tuple[int, str]]:
    """Two processes of one run: their exit codes and what they wrote to stderr."""
    folder.mkdir(parents=True)
    script = folder / "worker.py"
    script.write_text(WORKER.format(tests=[str(folder) for folder in Path(__file__).parents[:2]]))
    environment = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-W",
        "error::FutureWarning",
        str(script),
        str(folder),
        precision,
        str(kill_at),
    ]
    workers = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=120)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    return [(worker.returncode, error) for worker, error in zip(workers, errors, strict=True)]


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    for code, error in pair(tmp_path / "two", "float64"):
        assert code == 0, error
    together = records.load(tmp_path / "two" / "records" / "pair" / "0.json")
    alone = start(tmp_path / "one", PAIR, precision="float64")
    assert together.processes == 2
    assert losses(together) == pytest.approx(losses(alone), abs=1e-9)
    assert together.predictions_sha256 == alone.predictions_sha256
    assert (together.test_error, together.selected_epoch) == (
        alone.test_error,
        alone.selected_epoch,
    )


def test_a_killed_worker_ends_the_run_with_a_clear_message_and_it_resumes(tmp_path: Path) -> None:
    (first, error), (second, _) = pair(tmp_path / "two", "float32", kill_at=14)
    assert second == -signal.SIGKILL
    assert first == 3, error
    assert time.time() - (tmp_path / "two" / "lost").stat().st_mtime < 60
    assert "WorkerLostError: process 0 of 2 lost another one" in error
    assert "The checkpoint after epoch 3 is kept in" in error
    assert not (tmp_path / "two" / "records").exists()
    resumed = start(tmp_path / "two", PAIR, precision="float32")
    alone = start(tmp_path / "one", PAIR)
    assert [e["epoch"] for e in resumed.epochs] == [1, 2, 3, 4, 5]
    assert [(part["after"], part["processes"]) for part in resumed.parts or []] == [(0, 2), (3, 1)]
    steps = [[e["loss"] for e in record.epochs] for record in (resumed, alone)]
    assert steps[0] == pytest.approx(steps[1], abs=1e-6)


@pytest.mark.slow
def test_a_job_that_torchrun_starts_again_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    outcomes = []
    for word in ("whole", "kill"):
        folder = tmp_path / word
        folder.mkdir()
        script = folder / "worker.py"
        script.write_text(ELASTIC.format(tests=[str(f) for f in Path(__file__).parents[:2]]))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
        command += ["--max-restarts=1", f"--master-port={free_port()}", str(script), str(folder)]
        done = subprocess.run(
            [*command, word],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        record = records.load(folder / "records" / "pair" / "0.json")
        outcomes.append((losses(record), record.predictions_sha256, weights(folder, PAIR)))
    assert (tmp_path / "kill" / "killed").exists()
    assert [part["processes"] for part in record.parts or []] == [2]
    assert "going on" in done.stderr, done.stderr
    assert outcomes[1] == outcomes[0]


def test_a_batch_must_be_shared_equally() -> None:
    data = stripes()
    three = Processes(0, 3, torch.device("cpu"))
    with pytest.raises(ValueError, match="3 processes can share equally; got 16"):
        Trainer(TINY, 0, data.train, data, EXECUTION, three)
