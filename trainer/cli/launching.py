"""From settings and environment to running ranks: in place, by the agent, or by torch.multiprocessing.spawn.

Writes os.environ, from values that functions return, before torch is imported.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import trainer
from trainer import agent, codes, devices, log, stop
from trainer.beat import Phase, Records
from trainer.cli.elastic import run_elastic
from trainer.cli.environment import AGENT_JOB, AGENT_PID, BEAT_FD, STORE_FD
from trainer.cli.exposing import exposed, phase_of
from trainer.cli.hangs import allowance_for
from trainer.cli.ranks import exit_now, run_rank, visible_devices
from trainer.cli.resolved import Job, Resolved
from trainer.cli.streams import flush, mend_streams
from trainer.codes import SettingError, TrainerError
from trainer.config import unused
from trainer.launch import Node, Options, Rank, child_environment, describe, discover, find_idle_devices


def dispatch(job: Job) -> int:
    """Run the job in every rank that belongs here and return the exit code.

    Raises:
        SettingError: the launch is wrong, before anything was started.
    """
    resolved, config = job.resolved, job.resolved.config
    export(resolved.others)
    place = discover_place(resolved)
    is_child = AGENT_PID in os.environ
    log.setup(config.log_format, rank=place.rank if isinstance(place, Rank) else None)
    if not is_child:
        for line in launch_warnings(resolved, place):
            log.warning(line)
        log.info(describe(place))
    if place.launcher == "openmpi":
        # mpirun gives its ranks a terminal of its own, also where its output goes to a file: a live line is no use there.
        os.environ["TERM"] = "dumb"
    if isinstance(place, Rank):
        _set_environment(_rank_environment(resolved, place.local_world_size or 1))
        return run_rank(job, place, listen_fd=_descriptor(STORE_FD), beat_fd=_descriptor(BEAT_FD))
    processes = count_processes(resolved, place)
    _set_environment(_rank_environment(resolved, processes) | _single_node_environment(place, processes))
    if place.elastic is not None:
        return run_elastic(job, place, processes=processes)
    if place.launcher == "spawn":
        return _spawn(job, place, processes=processes)
    return _supervise(job, place, processes=processes)


def run_alone(job: Job) -> int:
    """Run a job that needs no ranks in this process, whatever the environment says of a launch, and return the exit code."""
    resolved = job.resolved
    export(resolved.others)
    log.setup(resolved.config.log_format)
    for line in [*resolved.warnings, *unused(resolved.config)]:
        log.warning(line)
    _set_environment(_rank_environment(resolved, 1))
    return run_rank(job, Rank(0, 1, 0), listen_fd=None)


def run_child() -> int:
    """Run the job that our agent handed over in the environment and return the exit code."""
    mend_streams()
    job = Job.loads(os.environ.pop(AGENT_JOB))
    try:
        return dispatch(job)
    except TrainerError as error:
        log.error(str(error))
        return error.code
    finally:
        flush()


def discover_place(resolved: Resolved) -> Rank | Node:
    """Find out what this process is, from the options and the environment. Raises SettingError."""
    config = resolved.config
    options = Options(
        launcher=config.launcher,
        nnodes=config.nnodes,
        node_rank=config.node_rank,
        nproc_per_node=config.nproc_per_node,
        master_addr=config.master_addr,
        master_port=config.master_port,
        local_rank=resolved.local_rank,
    )
    return discover(os.environ, options)


def launch_warnings(resolved: Resolved, place: Rank | Node) -> list[str]:
    """Return what a person should hear about settings and launch, one line each."""
    idle = find_idle_devices(place, devices=len(visible_devices(resolved.config)))
    return [*resolved.warnings, *unused(resolved.config), *place.warnings, *([idle] if idle else [])]


def count_processes(resolved: Resolved, node: Node) -> int:
    """Return how many ranks to start on this node. Raises SettingError: there are not the devices for them."""
    config, visible = resolved.config, visible_devices(resolved.config)
    if not visible and (config.device == "cuda" or config.backend == "nccl"):
        asked, instead = (
            ("device is cuda", "device cpu") if config.device == "cuda" else ("backend is nccl", "backend gloo")
        )
        raise SettingError(
            f"--{asked}, but no GPU is visible: {_build()}; {devices.cuda_facts()}; use --{instead} or auto"
        )
    if config.strategy in ("single", "dp"):
        if (node.processes or 1) > 1 or node.nodes > 1:
            raise SettingError(
                f"--strategy {config.strategy} is one process, but {node.nodes} x {node.processes or 1} were asked for; use --strategy ddp"
            )
        return 1
    processes = node.processes or max(1, len(visible))
    if visible:
        devices.check_processes(processes, devices=len(visible), visible=os.environ.get("CUDA_VISIBLE_DEVICES"))
    return processes


def _build() -> str:
    import importlib.metadata

    return f"torch {importlib.metadata.version('torch')}"


def _rank_environment(resolved: Resolved, local_ranks: int) -> dict[str, str]:
    """Return the variables that must be there before a rank imports torch; what the user set stays."""
    threads = devices.thread_count(local_ranks, user=os.environ.get("OMP_NUM_THREADS"), cpus=devices.usable_cpus())
    # Threads that sleep while they wait: with the default, which spins, a rank that shares its CPUs with anything else
    # ran 7 to 12 times slower (measured), and a CPU quota is spent on spinning.
    # torch's native warnings come with a stack; the same events reach a person as our own lines.
    wanted = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    if resolved.config.deterministic:
        wanted["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return wanted


def _single_node_environment(node: Node, processes: int) -> dict[str, str]:
    # A host's own name may resolve to nothing that gloo can use; within one host the loopback always works.
    return {"GLOO_SOCKET_IFNAME": "lo"} if node.nodes == 1 and processes > 1 and not node.elastic else {}


def _set_environment(wanted: dict[str, str]) -> None:
    for name, value in wanted.items():
        if not os.environ.get(name):  # an empty one is unset
            os.environ[name] = value


def export(others: Mapping[str, str]) -> None:
    """Set what files say beside settings; the environment wins, also where it is empty: CUDA_VISIBLE_DEVICES= hides all GPUs."""
    for name, value in others.items():
        os.environ.setdefault(name, value)


def _descriptor(variable: str) -> int | None:
    text = os.environ.pop(variable, None)
    return int(text) if text else None


def _listen(node: Node) -> socket.socket | None:
    """Open the socket that rank 0 will listen on, on a single node; where a port is asked for, only see that it is free."""
    try:
        if node.master_port is None:
            return agent.listen(node.master_addr)
        if node.node_rank == 0:
            dual = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if dual else socket.AF_INET
            socket.create_server(("", node.master_port), family=family, dualstack_ipv6=dual).close()
    except OSError as error:
        where = f"{node.master_addr}, any port" if node.master_port is None else f"port {node.master_port}"
        raise SettingError(
            f"rank 0 cannot listen on {where} of this host ({error.strerror}); see --master-addr and --master-port"
        ) from error
    return None


def _supervise(job: Job, node: Node, *, processes: int) -> int:
    config = job.resolved.config
    _make_importable()
    # -P: a file trainer.py in the working folder must not be run in our place.
    command = [sys.executable, "-P", "-m", "trainer", *sys.argv[1:]]
    restarts = config.max_restarts if config.max_restarts is not None else 3 if node.nodes == 1 else 0
    first_rank, trains = node.node_rank * processes, job.command == "train"
    with (
        agent.flight_recorder(os.environ) if visible_devices(config) else contextlib.nullcontext() as flight,
        exposed(config, first_rank=first_rank, wanted=trains) as seen,
    ):
        _set_environment((flight.environment if flight else {}) | seen.environment)

        def launch(run_name: str, causes: Sequence[str]) -> agent.Launch:
            launched = _launch(_again(job, run_name, causes), node, processes=processes)
            seen.records = launched.records
            return launched

        code = agent.supervise(
            command,
            launch=launch,
            first_rank=first_rank,
            grace=config.grace,
            max_restarts=restarts if trains else 0,
            flight=flight,
            metrics=seen.recorder,
        )
        seen.recorder.phase(phase_of(code))
        if code == codes.OK:
            seen.linger(config.metrics_linger_seconds, stop=agent.is_stopped)
        return code


def _again(job: Job, run_name: str, causes: Sequence[str]) -> Job:
    """Return the job of a start anew: in the run folder that the last start had made, from the checkpoints that are there now."""
    job = dataclasses.replace(job, restarts=tuple(causes))
    if not run_name:
        return job
    config = job.resolved.config
    resume = "auto" if config.resume == "never" else config.resume
    config = dataclasses.replace(config, run_name=run_name, resume=resume)
    return dataclasses.replace(job, resolved=dataclasses.replace(job.resolved, config=config))


def _launch(job: Job, node: Node, *, processes: int) -> agent.Launch:
    """Make the sockets, records and environments of one start. Raises SettingError."""
    listener = _listen(node)
    setup = allowance_for(job.resolved.config, single_node=node.nodes == 1).seconds(Phase.SETUP)
    records = Records(processes, seconds=setup)
    ours = {AGENT_PID: str(os.getpid()), AGENT_JOB: job.dumps(), BEAT_FD: str(records.fd)}
    environments = []
    for index in range(processes):
        variables = _child_variables(node, index, processes=processes, listener=listener)
        if listener and index == 0:
            variables[STORE_FD] = str(listener.fileno())
        environments.append(dict(os.environ) | ours | variables)
    return agent.Launch(environments, listener, records)


def _make_importable() -> None:
    """Let children find this package where it is not installed, as in `python -m trainer` in a checkout."""
    parent = str(Path(trainer.__file__).resolve().parent.parent)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if not parent.endswith("-packages") and parent not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, paths), parent])


def _child_variables(node: Node, index: int, *, processes: int, listener: socket.socket | None) -> dict[str, str]:
    port = listener.getsockname()[1] if listener else node.master_port
    return child_environment(node, index, processes=processes, master_port=port)


def _spawn(job: Job, node: Node, *, processes: int) -> int:
    import torch.multiprocessing

    listener = _listen(node)
    variables = [_child_variables(node, index, processes=processes, listener=listener) for index in range(processes)]
    arguments = (job, variables, listener)
    context = torch.multiprocessing.start_processes(
        _spawned, args=arguments, nprocs=processes, join=False, start_method="spawn"
    )
    assert context is not None
    if listener:
        listener.close()
    ends, first_rank = agent.Ends(), node.node_rank * processes

    def forward(signum: int, frame: object) -> None:
        ends.stop = max(ends.stop, signum)
        for process in context.processes:
            if process.is_alive():
                os.kill(process.pid, signum)

    for signum in stop.SIGNALS:
        signal.signal(signum, forward)
    failed = None
    try:
        while not context.join(grace_period=job.resolved.config.grace):
            pass
    except torch.multiprocessing.ProcessExitedException as error:
        failed = error.error_index
        ends.add(first_rank + failed, codes.from_process(error.exit_code))
    for index, process in enumerate(context.processes):
        # Once one has failed, torch sends SIGTERM to the others: their ends are no cause then.
        ended_by_torch = failed is not None and process.exitcode in (-signal.SIGTERM, codes.TERMINATED)
        ends.add(first_rank + index, codes.from_process(process.exitcode or 0), killed=ended_by_torch)
    return ends.code


def _spawned(index: int, job: Job, variables: list[dict[str, str]], listener: socket.socket | None) -> None:
    os.environ.update(variables[index])
    rank = discover(os.environ, Options(launcher="env"))
    assert isinstance(rank, Rank)
    log.setup(job.resolved.config.log_format, rank=rank.rank)
    descriptor = listener.detach() if listener and rank.rank == 0 else None
    exit_now(run_rank(job, rank, listen_fd=descriptor))
