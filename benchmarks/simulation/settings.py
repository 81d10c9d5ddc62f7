"""The figures: trainings of the papers, machines and failures, and what systems claim. Each with where it is from.

"Notes on" a paper are what was read of it: of LowDiff mostly its code, of the others abstracts. The notes on Checkflow
have cases that are derived, not published: a step takes 6 x parameters x tokens / FLOP/s; "trial" is the program that
computes them. A source that begins with "assumed" is nobody's figure but ours; it says why.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Figure:
    """A number and where it is from."""

    value: float
    source: str

    @property
    def assumed(self) -> bool:
        return self.source.startswith("assumed")


@dataclass(frozen=True)
class Setting:
    """A training and its machines. Seconds, bytes, bytes a second; rates are those of one GPU or one machine."""

    name: str
    title: str
    parameters: Figure
    gpus: Figure
    machines: Figure
    shards: Figure
    """GPUs over which one copy of the state is divided: each of them copies and loads its part."""
    replicas: Figure
    """Data-parallel ranks that each send their own gradient, of which LowDiff logs all lists."""
    step: Figure
    update: Figure
    """The part of a step in which the optimizer changes the state."""
    state: Figure
    """Bytes of weights, masters and moments, all ranks together, each once."""
    copy_rate: Figure
    """From a GPU to its host."""
    network_rate: Figure
    """Of a machine."""
    storage_rate: Figure
    """Of durable storage, all machines together, both ways."""
    mtbf: Figure
    restart: Figure
    """From a failure to the moment when states are loaded."""
    machine_share: Figure
    """The share of failures that take a machine with its memory away."""

    @property
    def copy(self) -> float:
        """Seconds to copy the state to the hosts, and back."""
        return self.state.value / (self.copy_rate.value * self.shards.value)

    @property
    def write(self) -> float:
        """Seconds to write the state to durable storage, or to read it."""
        return self.state.value / self.storage_rate.value

    def figures(self) -> dict[str, Figure]:
        """All figures by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Figure)}


GB = 1e9
_LLAMA3 = "Llama 3 paper (arXiv 2407.21783), as quoted in the notes on simulations"
_MTBF = "notes on LowDiff: a case of the table of simulated runs"
_SHARE = Figure(
    0.78, "Llama 3 paper (arXiv 2407.21783): summaries state that about 78 % of interruptions were hardware"
)
_RESTART = Figure(120, "assumed: the example of docs/planning.md; no paper that we read states it")
_SPOT_RESTART = Figure(60, "notes on LowDiff, and trials of the plan: the cases with short times between failures")
_H200_COPY = Figure(45 * GB, "trial: cases on H200, 45 GB/s from GPU to host")
_ONE = Figure(1, "one GPU")
_STORE_2 = Figure(2 * GB, "notes on LowDiff: W = 2 GB/s")
_STORE_10 = Figure(10 * GB, "notes on the speed of replay: 10 GB/s read; assumed for writing too")


def _parameters(count: float, case: str) -> Figure:
    return Figure(count, f"trial: case {case!r}")


def _network(rate: float) -> Figure:
    return Figure(rate, "assumed: eight links of 400 Gbit/s a machine, usual for machines of 8 H100 or H200")


GPT2_L = Setting(
    name="gpt2-l",
    title="GPT2-L, 8 A100, data parallel (LowDiff's workload)",
    parameters=_parameters(0.77e9, "GPT2-L 0.77B, 1xA100, fp32 Adam"),
    gpus=Figure(8, "notes on LowDiff: the example with W = 8 ranks; LowDiff's own testbed was not read"),
    machines=Figure(2, "assumed: 4 GPUs a machine, so that Gemini has a peer"),
    shards=Figure(1, "notes on LowDiff: rank 0 saves the whole state"),
    replicas=Figure(8, "notes on LowDiff: W = 8"),
    step=Figure(0.392, "trial: the case's T_iter, 0.378 s forward and backward, 0.013 s update"),
    update=Figure(0.013, "trial: U = 2 S / 1.4e12"),
    state=Figure(9.24 * GB, "trial: 12 bytes for each parameter"),
    copy_rate=Figure(20 * GB, "trial: 20 GB/s on A100"),
    network_rate=Figure(12.5 * GB, "assumed: 100 Gbit/s a machine"),
    storage_rate=_STORE_2,
    mtbf=Figure(1800, f"{_MTBF}, 30 min"),
    restart=_SPOT_RESTART,
    machine_share=_SHARE,
)
GPT2_XL = Setting(
    name="gpt2-xl",
    title="GPT2-XL, 1 H200",
    parameters=_parameters(1.5e9, "GPT2-XL 1.5B, 1xH200 bf16+fp32"),
    gpus=_ONE,
    machines=_ONE,
    shards=_ONE,
    replicas=_ONE,
    step=Figure(0.433, "notes on Checkflow: T = 0.433 s"),
    update=Figure(0.012, "trial: U = 2 S / 3.5e12"),
    state=Figure(21 * GB, "notes on Checkflow: 21 GB of state on one GPU"),
    copy_rate=_H200_COPY,
    network_rate=Figure(12.5 * GB, "assumed: 100 Gbit/s a machine"),
    storage_rate=_STORE_2,
    mtbf=Figure(10_800, f"{_MTBF}, 3 h"),
    restart=_RESTART,
    machine_share=_SHARE,
)
LLAMA_7B = Setting(
    name="llama-7b",
    title="Llama 7B, 8 H200, FSDP",
    parameters=_parameters(6.7e9, "Llama 7B, 8xH200 FSDP"),
    gpus=Figure(8, "trial: the case's name"),
    machines=Figure(1, "trial: 8 GPUs, one machine"),
    shards=Figure(8, "trial: FSDP over 8"),
    replicas=Figure(8, "trial: FSDP over 8 ranks, each with its own batch"),
    step=Figure(1.74, "notes on Checkflow: T = 1.74 s"),
    update=Figure(0.0067, "trial: U = 2 S / 3.5e12"),
    state=Figure(8 * 11.7 * GB, "notes on Checkflow: 11.7 GB a GPU"),
    copy_rate=_H200_COPY,
    network_rate=_network(400 * GB),
    storage_rate=_STORE_10,
    mtbf=Figure(10_800, f"{_MTBF}, 3 h"),
    restart=_RESTART,
    machine_share=_SHARE,
)
LLAMA_7B_SHORT = Setting(
    name="llama-7b-short",
    title="Llama 7B, 8 H200, 1,024 tokens a GPU: steps of 0.14 s",
    parameters=LLAMA_7B.parameters,
    gpus=LLAMA_7B.gpus,
    machines=LLAMA_7B.machines,
    shards=LLAMA_7B.shards,
    replicas=LLAMA_7B.replicas,
    step=Figure(0.14, "notes on simulations: 7B at 1 k tokens a GPU, t = 0.14 s"),
    update=LLAMA_7B.update,
    state=LLAMA_7B.state,
    copy_rate=_H200_COPY,
    network_rate=LLAMA_7B.network_rate,
    storage_rate=_STORE_10,
    mtbf=LLAMA_7B.mtbf,
    restart=_RESTART,
    machine_share=_SHARE,
)
SPOT_7B = Setting(
    name="spot-7b",
    title="7B on 64 spot machines of one A100 (PCcheck's machines and failures)",
    parameters=LLAMA_7B.parameters,
    gpus=Figure(64, "PCcheck (ASPLOS '25), as summarised by senbon-sakura.github.io: a cluster of 64 GPUs"),
    machines=Figure(64, "PCcheck, same summary: a2-highgpu-1g, one A100 a machine"),
    shards=Figure(64, "assumed: the state divided over all, as FSDP does"),
    replicas=Figure(64, "assumed: as shards"),
    step=Figure(1.74, "assumed: as Llama 7B above; PCcheck's own step times were not read"),
    update=Figure(0.005, "assumed: below 1 % of a step, as in the trial's cases"),
    state=Figure(108 * GB, "PCcheck, same summary: BLOOM-7B has checkpoints of 108 GB"),
    copy_rate=Figure(12 * GB, "assumed: what PCIe 3 x16 gives; PCcheck, same summary, states the link only"),
    network_rate=Figure(15e9 / 8, "PCcheck, same summary: 15 Gbit/s measured between machines"),
    storage_rate=Figure(
        64 * 0.515 * GB, "notes on CheckFreq: 515 MB/s, hard-coded in CheckFreq's code; times 64 disks"
    ),
    mtbf=Figure(86_400 / 127, "PCcheck, same summary: up to 127 preemptions in 24 hours in a cluster of 64 GPUs"),
    restart=_SPOT_RESTART,
    machine_share=Figure(1, "a preempted machine is gone"),
)
LLAMA_70B = Setting(
    name="llama-70b",
    title="Llama 70B, 64 H200, FSDP",
    parameters=_parameters(70e9, "Llama 70B, 64xH200 FSDP"),
    gpus=Figure(64, "trial: the case's name"),
    machines=Figure(8, "assumed: 8 GPUs a machine"),
    shards=Figure(64, "trial: FSDP over 64"),
    replicas=Figure(64, "trial: FSDP over 64 ranks, each with its own batch"),
    step=Figure(9.1, "notes on Checkflow: T = 9.1 s"),
    update=Figure(0.0088, "trial: U = 2 S / 3.5e12"),
    state=Figure(64 * 15.3 * GB, "notes on Checkflow: 15.3 GB a GPU"),
    copy_rate=_H200_COPY,
    network_rate=_network(400 * GB),
    storage_rate=Figure(40 * GB, "assumed: 5 GB/s for each of 8 machines"),
    mtbf=Figure(43_200, f"{_MTBF}, 12 h"),
    restart=_RESTART,
    machine_share=_SHARE,
)
LLAMA3_405B = Setting(
    name="llama3-405b",
    title="Llama 3 405B, 16,384 H100",
    parameters=Figure(405e9, _LLAMA3),
    gpus=Figure(16_384, _LLAMA3),
    machines=Figure(2_048, "assumed: 8 GPUs a machine"),
    shards=Figure(16_384, "assumed: FSDP divides the state over all GPUs"),
    replicas=Figure(128, "assumed: 16,384 GPUs by tensor parallelism of 8 and 16 stages"),
    step=Figure(6.0, "assumed: 6 x 405e9 x 16e6 tokens / (16,384 x 400 TFLOP/s)"),
    update=Figure(0.01, "assumed: below 1 % of a step, as in the trial's cases"),
    state=Figure(12 * 405 * GB, "assumed: 12 bytes for each parameter"),
    copy_rate=Figure(45 * GB, "assumed: as on H200"),
    network_rate=_network(400 * GB),
    storage_rate=Figure(2000 * GB, "assumed: below the peak of 7 TB/s that a summary of the Llama 3 paper states"),
    mtbf=Figure(54 * 86_400 / 419, f"{_LLAMA3}: 419 unexpected interruptions in 54 days"),
    restart=Figure(300, "assumed: more than in the small settings; no paper that we read states it"),
    machine_share=_SHARE,
)
MT_NLG = Setting(
    name="mt-nlg-530b",
    title="MT-NLG 530B, 2,240 A100, storage of 20 Gbit/s (Gemini's example)",
    parameters=Figure(530e9, "Gemini (SOSP '23), as quoted at news.ycombinator 39074646: MT-NLG"),
    gpus=Figure(2_240, "MT-NLG paper, section 2.4, as quoted by github.com/cli99/llm-analysis: 280 DGX A100"),
    machines=Figure(280, "MT-NLG paper, section 2.4, same quotation"),
    shards=Figure(
        280, "MT-NLG: tensor parallelism of 8, 35 stages; a replica has 280 A100 (news.ycombinator 39074646)"
    ),
    replicas=Figure(8, "2,240 GPUs by 280"),
    step=Figure(60.1, "MT-NLG paper, section 2.4, same quotation: 60.1 s at batch size 1,920"),
    update=Figure(0.1, "assumed: below 1 % of a step, as in the trial's cases"),
    state=Figure(
        42 * 60 * 20e9 / 8, "Gemini (SOSP '23), same quotation: 42 min at 20 Gbit/s, which is 12 bytes a parameter"
    ),
    copy_rate=Figure(20 * GB, "trial: 20 GB/s on A100"),
    network_rate=Figure(200 * GB, "assumed: eight links of 200 Gbit/s a machine, usual for machines of 8 A100"),
    storage_rate=Figure(20e9 / 8, "Gemini (SOSP '23), same quotation: 20 Gbit/s to remote persistent storage"),
    mtbf=Figure(54 * 86_400 / 419 * 16_384 / 2_240, f"{_LLAMA3}: the rate of a GPU; assumed for A100"),
    restart=Figure(300, "assumed: more than in the small settings; no paper that we read states it"),
    machine_share=_SHARE,
)
SETTINGS = {
    one.name: one for one in (GPT2_L, GPT2_XL, LLAMA_7B, LLAMA_7B_SHORT, SPOT_7B, LLAMA_70B, LLAMA3_405B, MT_NLG)
}


@dataclass(frozen=True)
class SystemFigures:
    """What systems claim, or what we measured of ours."""

    checkfreq_overhead: Figure = Figure(0.035, "CheckFreq (FAST '21), abstract: runtime overhead within 3.5 %")
    gemini_network: Figure = Figure(
        0.5, "assumed: copies get half of the network, in the pauses of training's own traffic"
    )
    gemini_lost: Figure = Figure(
        0.01, "assumed: failures that take both copies of a part; the paper's placement makes them rare"
    )
    lowdiff_slowdown: Figure = Figure(
        0.031, "LowDiff v1 (arXiv 2509.04084), abstract: less than 3.1 %; we take the bound"
    )
    lowdiff_density: Figure = Figure(0.01, "notes on LowDiff: rho = 0.01 in LowDiff's code")
    lowdiff_nbytes: Figure = Figure(8, "notes on LowDiff: 8 bytes for each value sent, of each rank")
    lowdiff_batch: Figure = Figure(20, "notes on LowDiff: LowDiff's flags for GPT2-L")
    lowdiff_plus_slowdown: Figure = Figure(
        0.031, "assumed: as LowDiff; the abstract of v3 states no overhead of LowDiff+"
    )
    host_rate: Figure = Figure(
        10e9,
        "notes on replay: the update moves 28 bytes a parameter, 300 GB/s of memory a machine (estimated there)",
    )
    checkmate_slowdown: Figure = Figure(
        0.0, "Checkmate (arXiv 2507.13522), abstract: throughput comparable to a run without checkpoints"
    )
    our_slowdown: Figure = Figure(
        0.0056, "results/recording.md: the hook takes 0.56 % of a step (CPU; on a GPU not measured)"
    )
    our_nbytes: Figure = Figure(1.333, "results/recording.md: bytes a parameter and step, exact, training in bfloat16")
    our_int8_nbytes: Figure = Figure(
        0.908, "results/recording.md: bytes a parameter and step, int8 (the replay is approximate)"
    )
    our_topk_nbytes: Figure = Figure(
        0.04, "docs/recording.md: bytes a parameter and step for each 1 % of values; each rank of top 1 % adds its own"
    )
    our_replay_rate: Figure = Figure(
        450e6, "results/recording.md, the shadow: 448 million parameters a second of a core, float32"
    )
    our_cores: Figure = Figure(16, "assumed: cores of a machine that replay while it would otherwise wait")
    our_flush: Figure = Figure(8, "docs/recording.md: flush = 8 steps by default")
    peer_cpu: Figure = Figure(
        0.5e-9,
        "trial of transports: sockets take 0.15 CPU s a GB to send and 0.19 to receive; results/protect.md: 0.12 to "
        "add a parity; assumed: 0.04 to hash",
    )
    peers_jump: Figure = Figure(8, "design of peers' memory: jump=8, more than the machines of a rack")
    burst_share: Figure = Figure(
        0.084,
        "Llama 3 paper, table of interruptions as quoted at glennklockwood.com/garden/component-reliability: 8.4 % are "
        "switches and cables; all of them count as bursts, which is too many",
    )
    burst_machines: Figure = Figure(4, "assumed: mean machines of a burst, as many as a rack of 8-GPU machines has")
    burst_neighbours: Figure = Figure(
        0.75, "assumed; Ford et al. (OSDI '10), summarised at out13.com: most large bursts are events of racks"
    )
    everything_share: Figure = Figure(
        0.005, "assumed: failures that take the memory of all machines, such as power; nobody we read states it"
    )
    shadow_bases: Figure = Figure(1000, "docs/shadows.md, the example: --base-every 1000")


FIGURES = SystemFigures()
