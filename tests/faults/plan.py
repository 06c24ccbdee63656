"""The plan of faults: its rows, and what a trial is."""

import dataclasses
import importlib
from collections.abc import Callable, Iterable

LONGEST_SECONDS = 3600.0  # of a row: one that would take longer runs with fewer trials


@dataclasses.dataclass(frozen=True)
class Trial:
  """What became of one trial.

  Attributes:
    name: what was done, with what it takes to do it again (the seed, the moment, the process).
    passed: whether everything that the row asks for held.
    note: where it failed, what was seen; else what was measured, or "".
    seconds: that it took.
  """

  name: str
  passed: bool
  note: str
  seconds: float


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of the plan.

  Attributes:
    number: of the row.
    fault: what is done to the run.
    trials: how often, by the plan.
    passes: when a trial has passed.
    module: in tests.faults; its function `row_NUMBER(trials, folder)` makes the trials and gives
      them, all at the end or one after the other; with a third argument `seed`, the number of the
      first.
    seconds: that a trial takes on two quiet cores: a guess, until the row has been run.
    usual: how many trials without --trials, where not those of the plan.
    note: what is to be known of it; for people.
  """

  number: int
  fault: str
  trials: int
  passes: str
  module: str
  seconds: float
  usual: int | None = None
  note: str = ""

  def default(self, seconds: float) -> int:
    """Returns how many trials are made where nobody says, when each takes so many seconds."""
    return max(1, min(self.usual or self.trials, int(LONGEST_SECONDS / seconds)))

  def function(self) -> Callable[..., Iterable[Trial]]:
    """Returns the function that makes the trials."""
    return getattr(importlib.import_module(f"tests.faults.{self.module}"), f"row_{self.number}")


ROWS = (
  Row(
    1,
    "SIGKILL of a random process at a random time",
    70,
    "resumes by itself; Same; at most two checkpoint intervals redone; no process left behind",
    "rows_kills",
    26,
    note="50 trials with 2 processes, 20 with 4, under `processes.launch --restarts`. Every other "
    "kill comes after the first step: most of a run this short is its start.",
  ),
  Row(
    2,
    "SIGKILL at each stage of a save: directory made, data, metadata, commit, rename, garbage "
    "collection, digest file",
    35,
    "the old step or the new one loads, never a torn one",
    "rows_checkpoints",
    30,
  ),
  Row(
    3,
    "SIGKILL of all; again during restore",
    30,
    "Same",
    "rows_kills",
    30,
    note="Every third trial kills a second time, while checkpoints are read. Odd trials kill the "
    "launcher too.",
  ),
  Row(
    4,
    "SIGKILL of process 0, or of another process",
    20,
    "all others end within 25 s (JAX aborts them); the launcher names the one that died first; "
    "Same after restart",
    "rows_kills",
    28,
  ),
  Row(
    5,
    "SIGTERM at any time, also during evaluation, compilation, a save, a stalled input",
    30,
    "exit 75 within 30 s, one common step saved, no step lost; Same after restart",
    "rows_stops",
    25,
    note="A stop after the last step may come too late to change anything: then all exit with 0.",
  ),
  Row(
    6,
    "SIGSTOP of one process; a sleep in one loader",
    40,
    "noticed within 45 s, the process named, stacks dumped; Same after restart",
    "rows_standstills",
    35,
    note="Where JAX's own heartbeat expires before the deadline that the watchdog has learned (at "
    "the start and at the end), the others are ended without naming the stopped process, unless "
    "the launcher names it. A stop in a step, an evaluation or a save is always named.",
  ),
  Row(
    7,
    "data sets of every remainder 0-15, dropping or padding; one iterator that ends early",
    34,
    "equal steps everywhere, no hang; padded loss within 1e-6 of one process",
    "rows_processes",
    4,
    note="A trial is a remainder in training (nothing is dropped: the rest of an epoch shares a "
    "batch with the next) or in evaluation (padded), on 1, 2 and 4 processes.",
  ),
  Row(
    8,
    "a process that differs: batch shape, config, dtype, seed, code version, mesh",
    10,
    "refused before the first collective within 15 s, the key named",
    "rows_processes",
    8,
    usual=19,
    note="19 kinds of difference; the first ten are those of the plan. On a machine with more work "
    "than processors the 15 s are as many times longer.",
  ),
  Row(
    9,
    "restore with other layers, width, dtype, optimizer, data",
    12,
    "refusals that name the difference, no silent cast",
    "rows_checkpoints",
    10,
  ),
  Row(
    10,
    "save on each of {1, 2, 4 processes} x {dp, fsdp, tp}, restore on each other",
    72,
    "parameters bit-equal; next example ids equal; next loss within 1e-6",
    "rows_checkpoints",
    15,
  ),
  Row(
    11,
    "a bit flipped, a file truncated, a file deleted, in each class of file of a checkpoint",
    200,
    "all noticed; falls back to the older step and reports it",
    "rows_checkpoints",
    4,
    note="On a run whose two processes each write arrays. Every 20th trial resumes with two "
    "processes. In the others the application's reader reads the newest intact step.",
  ),
  Row(
    12,
    "disk full at each stage of a save",
    10,
    "the last good step is kept; reported at the next step; saves continue once there is space",
    "rows_checkpoints",
    30,
  ),
  Row(
    13,
    "100 bad records of 10,000; then 6 % bad",
    8,
    "exactly those 100 get weight 0 and are listed, all other rows stay where they were; stops "
    "above the limit (5 %)",
    "rows_records",
    30,
  ),
  Row(
    14,
    "NaN gradients; a loss 10,000 times too large",
    30,
    "never checkpointed; roll back and skip gives the same run as one that skips those batches",
    "rows_numbers",
    30,
  ),
  Row(
    15,
    "a bit of a parameter flipped on one replica; 2,000 clean steps",
    20,
    "caught at the next check (within 10 steps); no false alarm",
    "rows_silent",
    45,
    usual=21,
    note="With 2 and 4 replicas, on 2 and 4 processes, in the memory of a process: any bit of a "
    "word. A flip that makes the loss infinite is found as a bad step, which names no process. The "
    "last trial is the clean one, with a check after every step.",
  ),
  Row(
    16,
    "a process three times slower; 2,000 clean steps",
    20,
    "named within 10 steps; no false alarm",
    "rows_silent",
    35,
    usual=21,
    note="SIGSTOP and SIGCONT in turns of 30 to 150 ms leave a third of the time to one process. "
    "The last trial is the clean one.",
  ),
  Row(
    17,
    "elastic: 4 -> 3 -> 2 -> 4 processes (global batch 12)",
    10,
    "each step sees the examples of the fixed run; loss within 1e-5 of it",
    "rows_processes",
    40,
  ),
  Row(
    18,
    "clean ends with 0-20 s of skew between processes",
    50,
    "exit code 0",
    "rows_stops",
    28,
  ),
  Row(
    19,
    "a truncated compilation cache entry; shared memory after row 1",
    10,
    "repaired; nothing leaked",
    "rows_silent",
    25,
    note="Even trials damage the largest entry. Odd ones kill a run that has just prepared its "
    "data, and inspect /dev/shm and the folder for temporary files.",
  ),
  Row(
    20,
    "an hour of Poisson kills, one per 180 s on average",
    20,
    "goodput at least 90 %; the bins of lost time add up to the total within 1 %",
    "rows_goodput",
    190,
    note="A trial is a kill; the last one is the check of the whole run.",
  ),
  Row(
    21,
    "Ctrl-C in a real terminal, at a random moment of each phase: imports, data preparation, "
    "compilation, steps, evaluation, a save, the end; of each verb; under processes.launch; twice",
    42,
    "exit 75 without a traceback, the last step saved, one line where nothing is to be saved; "
    "twice: 130; Same after restart",
    "rows_terminals",
    25,
    note="A stop after the last step may come too late to change anything: then it exits with 0.",
  ),
  Row(
    22,
    "a slow disk (a save takes several times the start timeout), a hanging disk, a slow trace, a "
    "slow input",
    10,
    "a save or trace that progresses is never ended: exit 0, Same; one that hangs is, with exit 1; "
    "a slow input of a single process is warned about",
    "rows_slow",
    60,
    note="Writes are slowed to a few kilobytes at a time by a preloaded library (LD_PRELOAD). "
    "Needs a C compiler.",
  ),
  Row(
    23,
    "two starts in one workdir, 0-60 s apart; the first continues, is stopped, or is killed",
    20,
    "one of them trains, each step appears once, Same; the other is refused with 2, naming the "
    "owner, or takes over once the first has ended",
    "rows_owners",
    70,
  ),
  Row(
    24,
    "an owner suspended by SIGSTOP, replaced after its lease, resumed",
    16,
    "it writes nothing more and ends with 2; Same",
    "rows_owners",
    50,
    note="Of 2 suspended processes JAX may end some by SIGABRT before they notice.",
  ),
  Row(
    25,
    "damage to metrics.jsonl and to each small file of a workdir and of prepared data",
    40,
    "the start continues with a warning, or is refused in one message with nothing changed, and "
    "continues once the file is repaired; Same, except for lines that were destroyed",
    "rows_files",
    20,
    note="Content: emptied, deleted, truncated, NULs, random bytes, lines inserted, JSON of "
    "another form or nested 100,000 deep. Place: a directory, a FIFO, a sparse terabyte, a "
    "symbolic link.",
  ),
  Row(
    26,
    "foreign folders among the checkpoints; FIFOs, devices, links and sparse files in one; clocks "
    "that jump by an hour or a year",
    20,
    "foreign files are reported and left unchanged; the step before is used, in time; the bins of "
    "goodput add up; links are followed for folders and refused for files; Same",
    "rows_foreign",
    20,
    note="Of five trials two are about files in a checkpoint, and one each about folders, clocks "
    "and links. The wall clock jumps within a process, or between two, the first of which is "
    "killed.",
  ),
  Row(
    27,
    "hostile messages at the rendezvous and in the key-value store: a seeded fuzz",
    40,
    "the run is unaffected: Same, exit 0; every process meets the others and receives their "
    "messages, and none from outside",
    "rows_network",
    4,
    note="Every tenth trial attacks the port of a whole run of 2 processes until it ends; the "
    "others send 120 messages to a rendezvous of 4 processes, or 200 entries to the coordination "
    "service of 3.",
  ),
  Row(
    28,
    "a rendezvous of 2 to 4,096 processes, some late, with silent connections beside them",
    16,
    "all meet within 30 s of the last one's arrival",
    "rows_network",
    8,
    note="Each process has its own socket; they are threads of four processes. 2, 3, 16, 64, "
    "256, 1,024, 2,048 and 4,096 of them in turn.",
  ),
  Row(
    29,
    "wrong command lines, override values, variables; damaged small files of a workdir",
    500,
    "ends in time with an exit code that this input allows, one message, no traceback and no "
    "control character; a refusal leaves the workdir unchanged",
    "rows_inputs",
    2,
    note="Seeded. The four kinds in turn, each in a fork of a process that has imported "
    "everything; JAX has read its own variables before.",
  ),
  Row(
    30,
    "an evaluation that gives NaN or infinity after a step with finite numbers",
    20,
    "never checkpointed; roll back and skip gives the same run as one that skips those batches",
    "rows_numbers",
    30,
  ),
  Row(
    31,
    "SIGKILL while text is prepared, one to three times in a row: of the command, or of one of its "
    "worker processes",
    30,
    "complete shards stay and the same command continues; the store is that of an undisturbed "
    "preparation to the byte; no worker outlives the command",
    "rows_text",
    12,
  ),
  Row(
    32,
    "SIGKILL of one process, of process 0, or of two, in each phase, under "
    "`processes.launch --replacements`",
    40,
    "what died is replaced and the others stay, or JAX ends all, which are replaced; exit 0; Same; "
    "no process left behind",
    "rows_in_place",
    30,
    note="If process 0 dies, JAX ends the others, and the launcher replaces them, too.",
  ),
  Row(
    33,
    "SIGKILL of one of four processes, and of another one during the recovery",
    20,
    "as in row 32",
    "rows_in_place",
    45,
  ),
  Row(
    34,
    "checkpoints in memory: SIGKILL of one or two of 2 or 4 processes of a host, at any step; "
    "their copies stay, one's is lost, or all are",
    48,
    "resumes from the newest step in memory, or from storage where all copies are lost; at most "
    "two intervals of memory made again; Same; no copy is left",
    "rows_memory",
    40,
    note="Shards that one process has and its peer a copy of, and replicas, in turn.",
  ),
  Row(
    35,
    "checkpoints in memory of 2 hosts: one is replaced by an empty one, both are, a bit of a copy "
    "changes, there is no space for any",
    24,
    "resumes from memory by what the other host sends; from storage; from an intact copy; the run "
    "continues with a message, and resumes from storage. Same; no copy is left",
    "rows_memory",
    60,
    note="Hosts are namespaces with a name and a /dev/shm of their own, which takes root. 4 "
    "processes, sharded over all.",
  ),
  Row(
    36,
    "checkpoints in memory: SIGSTOP of one of 4 processes; the network between two hosts is cut",
    12,
    "the launcher kills the stopped one and names it; all end within 60 s of the cut; they resume "
    "from memory; at most two steps made again; Same",
    "rows_memory",
    60,
    note="Hosts are namespaces with networks of their own, which takes root.",
  ),
)
