"""The groups of jobs to run. Each job is one program in its own process.

A group takes a few minutes on an NVIDIA H200, `shortages` and `alive` a quarter of an hour each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

POLICIES = ("segments", "expandable", "paged")

WORKLOADS = (
    "gpt2_train",
    "llama_varlen",
    "vision_multires",
    "generate",
    "stream_offload",
    "graphs_serving",
)
# These do not depend on the timing of streams: peak reserved has to be PyTorch's, to the byte.
SINGLE_STREAM = ("gpt2_train", "llama_varlen", "vision_multires", "generate")
STEPS = 12

# The modes that are compared: a name, and the arguments of the measuring programs.
MODES = {
    "native": ("native",),
    "expandable": ("expandable",),
    "cushion segments": ("cushion", "--policy", "segments"),
    "cushion expandable": ("cushion", "--policy", "expandable"),
    "cushion paged": ("cushion", "--policy", "paged"),
}

# The mode of PyTorch that each mode of Cushion is compared with; for `paged`, the one that wastes less.
TWINS = {"cushion segments": "native", "cushion expandable": "expandable", "cushion paged": "expandable"}

# Folders with examples.
EXAMPLES = ("../../examples/python", "../../gpu-kit/examples")

# Names for several groups.
TOGETHER = {"workloads": WORKLOADS}


@dataclass(frozen=True)
class Job:
    """A program with its arguments: a Python file of this folder, or a path from the repository's root."""

    key: str
    command: tuple[str, ...]
    timeout: int
    # Whether it prepares, reports that it is ready, and waits for a line on standard input.
    waits: bool = False
    # Other files, or folders with files, that it runs, relative to this folder.
    runs: tuple[str, ...] = ()

    @property
    def policy(self) -> str | None:
        """The policy of Cushion that the job tests; None if it tests all or none."""
        command = self.command
        return command[command.index("--policy") + 1] if "--policy" in command else None


@dataclass(frozen=True)
class Group:
    name: str
    about: str
    jobs: tuple[Job, ...]


def for_policies(programs: list[str], timeout: int, runs: tuple[str, ...] = ()) -> tuple[Job, ...]:
    return tuple(
        Job(f"{program} {policy}", (f"{program}.py", "--policy", policy), timeout, runs=runs)
        for program in programs
        for policy in POLICIES
    )


def alternating(
    name: str,
    modes: dict[str, tuple[str, ...]],
    rounds: int,
    program: tuple[str, ...],
    more: tuple[str, ...] = (),
) -> tuple[Job, ...]:
    """Returns jobs with every mode in each round; every second round is reversed, so that drift does not favour one
    mode."""
    jobs = []
    for number in range(1, rounds + 1):
        order = list(modes) if number % 2 else list(reversed(modes))
        for mode in order:
            command = (*program, *modes[mode], *more)
            jobs.append(Job(f"{name} {mode} {number}", command, 240, waits="--wait" in more))
    return tuple(jobs)


def shortages() -> tuple[Job, ...]:
    """Returns the jobs with shortages."""
    workloads = ("workloads.py",)
    return (
        Job("capped", ("capped.py",), 400, runs=workloads),
        *for_policies(["neighbour"], 240),
        *for_policies(["spilled"], 300, workloads),
        *for_policies(["side_stream"], 120),
        Job("micro_batches", ("micro_batches.py",), 300),
        *for_policies(["callbacks"], 120),
        *for_policies(["injected"], 240),
    )


def tests() -> list[Group]:
    contract = Job("contract", ("gpu-kit/gpu_contract",), 300)
    losses = Job("losses", ("losses.py",), 500, runs=("workloads.py",))
    return [
        Group("contract", "the driver layer alone, from Rust", (contract,)),
        Group(
            "api",
            "every function of torch.cuda.memory, forks and exits, and refused features",
            for_policies(["memory_api", "life", "refusals"], 240),
        ),
        Group("oom", "runs out of memory a thousand times", for_policies(["oom_cycles"], 400)),
        Group("graphs", "CUDA graphs during eager work", for_policies(["graphs"], 240)),
        Group("race", "memory freed while another stream reads it", for_policies(["race"], 120)),
        Group("losses", "models trained to the same losses", (losses,)),
        Group("doors", "programs written for other allocators", for_policies(["doors"], 240, ("blocks.py",))),
        Group("examples", "every example, and the C interface", for_policies(["examples"], 400, EXAMPLES)),
        Group(
            "ranks",
            "two ranks on one GPU, one of them short of memory; the largest batch that fits",
            (
                Job("two_ranks paged", ("two_ranks.py", "--policy", "paged"), 600),
                Job("batch_sizes paged", ("batch_sizes.py", "--policy", "paged"), 600),
            ),
        ),
        Group("shortages", "programs that run out of memory, and go on", shortages()),
        Group(
            "alive",
            "graphs dropped while they run, thousands of graphs, destroyed streams, with little memory",
            for_policies(["graphs_under_shortage", "many_pools", "destroyed_stream"], 400),
        ),
        Group(
            "waste",
            "excess with `paged`, and the same in a replay of the run",
            tuple(
                Job(f"replayed {name}", ("replayed.py", "--policy", "paged", name), 240, runs=("workloads.py",))
                for name in WORKLOADS
            ),
        ),
        Group("snapshot", "a recorded run, replayed to the same addresses", for_policies(["snapshot"], 240)),
    ]


def benches(rounds: int) -> list[Group]:
    groups = [
        Group(
            name,
            f"{STEPS} steps under PyTorch's allocators and Cushion's, in turn",
            alternating(name, MODES, rounds, ("workloads.py", name), ("--steps", str(STEPS), "--wait")),
        )
        for name in WORKLOADS
    ]
    # It has its own, shorter rounds.
    speed = Job("speed", ("speed.py",), 600, runs=("cca_speed.py",))
    return [*groups, Group("speed", "CPU time of a malloc and a free", (speed,))]


def of_kind(kind: str, rounds: int, policy: str | None = None) -> list[Group]:
    """Returns the groups of a kind; with a policy, without the jobs of other policies."""
    groups = tests() if kind == "test" else benches(rounds)
    if policy is None:
        return groups
    return [replace(group, jobs=tuple(job for job in group.jobs if job.policy in (None, policy))) for group in groups]


def chosen(groups: list[Group], names: list[str]) -> list[Group]:
    """Returns the named groups in their usual order; all if none is named. Raises ValueError for an unknown name."""
    known = {group.name for group in groups}
    wanted: set[str] = set()
    for name in names:
        together = set(TOGETHER.get(name, (name,)))
        if not together <= known:
            there_are = ", ".join(group.name for group in groups)
            raise ValueError(f"there is no group {name}; there are {there_are}")
        wanted |= together
    return [group for group in groups if not wanted or group.name in wanted]
