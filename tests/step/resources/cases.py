"""Every built-in resource as the conformance check uses it."""

from __future__ import annotations

import torch

from phalanx.device.cpu import CpuBackend
from phalanx.device.operators.base import HeadLayout
from phalanx.device.operators.torch_operators import TorchOperators
from phalanx.step.declaration import Fork, Segment, StepContext
from phalanx.step.resources.attention import AttentionSpec, AttentionStep
from phalanx.step.resources.base import BuildInfo
from phalanx.step.resources.cross_attention import CrossAttentionSpec, CrossAttentionStep
from phalanx.step.resources.joint_attention import JointAttentionSpec, JointStep
from phalanx.step.resources.kv_cache import KV_TAG, KVConfig, KVSpec, KVStep
from phalanx.step.resources.penalties import Penalties
from phalanx.step.resources.positions import PositionScheme, PositionSpec, PositionStep
from phalanx.step.resources.ragged_attention import RaggedAttentionSpec, RaggedStep
from phalanx.step.resources.recurrent_state import RecurrentStateSpec, StateBlock, StateStep
from phalanx.step.resources.sampler import SamplerConfig, SamplerSpec, SamplerStep
from phalanx.step.resources.sampling import RowFilter
from phalanx.step.resources.slot_state import SlotStateConfig, SlotStateSpec
from phalanx.testing.resource_case import ResourceCase

NODES = frozenset({"node"})
SPAN = 3
HEADS = HeadLayout(num_heads=2, num_kv_heads=1, head_dim=4)
VOCAB = 11


def built(*specs):
    """The resources of these specs, in order."""
    backend, made = CpuBackend(), {}
    for spec in specs:
        needed = {key: made[key] for key in spec.depends_on()}
        made[spec.key] = spec.build(BuildInfo(backend, needed))
    return tuple(made.values())


def mark(rid: str) -> float:
    """A number of one's own."""
    return float(sum(ord(letter) * place for place, letter in enumerate(rid, 1)) % 1009 + 1)


def segments(rids, span=SPAN, label="main"):
    return tuple(Segment(rid, span, label) for rid in rids)


def kv_config(**options) -> KVConfig:
    made = dict(
        num_layers=2,
        num_kv_heads=1,
        head_dim=4,
        num_pages=10,
        page_size=4,
        max_seq_len=64,
        dtype=torch.float32,
        host_pages=8,
    )
    return KVConfig(**{**made, **options})


def padded(ctx, values: list, times: int = SPAN) -> list:
    """As many values as a captured step has, of `times` a row."""
    rows = 0 if ctx.lease is None else ctx.lease.bucket.rows
    return values + [7e3] * (times * rows - len(values))


def tokens_of(plan, label: str) -> list[float]:
    """A number for every new token of a label, which its request and its place decide."""
    rows = zip(plan.rows.get(label, ()), plan.starts.get(label, ()), strict=True)
    return [
        mark(row.request_id) + 0.1 * (start + index)
        for row, start in rows
        for index in range(row.span)
    ]


def write_kv(resources, ctx) -> None:
    plan = ctx.plan_results["kv"]
    for label, paged in plan.by_label.items():
        values = torch.tensor(padded(ctx, tokens_of(plan, label)))
        for layer in range(2):
            for part in resources["kv"].layer(layer):
                part.flatten(0, 1)[paged.slots] = values[:, None, None]


def read_kv(resources, rid):
    cache = resources["kv"]
    found = {}
    for label in ("main", "branch", "context"):
        length = cache.stored_len(rid, label)
        if not length or cache.is_offloaded(rid):
            continue
        pages = torch.tensor(cache.pages(rid, label, length).pages, dtype=torch.int64)
        tokens = cache.layer(1)[0][pages].flatten(0, 1)[:length]
        found[label] = tokens[:, 0, 0].tolist()
    return found


KV = ResourceCase(
    step=lambda rids: {"kv": KVStep(segments(rids))},
    read=read_kv,
    compute=write_kv,
    row_tokens=SPAN,
    fork=lambda rid: {
        "kv": KVStep(segments((rid,), label="branch"), pre_forks=(Fork(rid, "main", "branch"),))
    },
    tags=frozenset({KV_TAG}),
)


def kv_factory():
    return built(KVSpec("kv", NODES, kv_config()))


def attend(resources, ctx) -> None:
    """The forward of two layers on projections that only the request and the place decide."""
    plan = ctx.plan_results["kv"]
    width = (HEADS.num_heads + 2) * HEADS.head_dim
    tokens = padded(ctx, tokens_of(plan, "main"))
    qkv = torch.tensor(tokens)[:, None].sin() * torch.arange(1.0, width + 1)
    rotary = torch.ones(len(tokens), 2), torch.zeros(len(tokens), 2)
    for _ in range(2):
        mixed = resources["attention"].attend(qkv, HEADS, rotary)
        assert torch.isfinite(mixed).all()


ATTENTION = ResourceCase(
    step=lambda rids: {"kv": KVStep(segments(rids)), "attention": AttentionStep()},
    read=read_kv,
    compute=attend,
    row_tokens=SPAN,
)


def attention_factory():
    return built(
        KVSpec("kv", NODES, kv_config()), AttentionSpec("attention", NODES, "kv", TorchOperators())
    )


def write_context(resources, ctx) -> None:
    plan, cross = ctx.plan_results["kv"], resources["cross"]
    rows = plan.rows.get("context", ())
    values = torch.tensor(padded(ctx, tokens_of(plan, "context")))[:, None, None].expand(-1, 1, 4)
    lowest = [-mark(row.request_id) - 0.1 * 30 for row in rows for _ in range(SPAN)]
    for layer in range(2):
        cross.write(values, -values)
        mixed = cross.attend(torch.ones(len(padded(ctx, lowest)), 2, 4))
        real = mixed[: len(lowest), 0]
        assert (real >= torch.tensor(lowest)).all(), "somebody else's context"
        assert not mixed[len(lowest) :].any(), "padding has no context"


CROSS = ResourceCase(
    step=lambda rids: {
        "kv": KVStep(segments(rids, label="context"), labels=("context",)),
        "cross": CrossAttentionStep(segments(rids)),
    },
    read=read_kv,
    compute=write_context,
    row_tokens=SPAN,
)


def cross_factory():
    return built(
        KVSpec("kv", NODES, kv_config()), CrossAttentionSpec("cross", NODES, "kv", TorchOperators())
    )


def attend_jointly(resources, ctx) -> None:
    """Two tokens a row beside the context that the step writes; neither sees anybody else's."""
    write_kv(resources, ctx)
    marks = [mark(rid) for rid in ctx.request_ids for _ in range(2)]
    own = torch.tensor(marks)[:, None, None].expand(-1, 1, 4)
    for _ in range(2):
        mixed = resources["joint"].attend(torch.zeros(len(own), 2, 4), own, own)
        lowest = torch.tensor(marks)[:, None]
        assert (mixed >= lowest - 1e-3).all() and (mixed <= lowest + 1.5).all()


JOINT = ResourceCase(
    step=lambda rids: {
        "kv": KVStep(segments(rids)),
        "joint": JointStep(segments(rids, span=2)),
    },
    read=read_kv,
    compute=attend_jointly,
)


def joint_factory():
    return built(KVSpec("kv", NODES, kv_config()), JointAttentionSpec("joint", NODES, "kv"))


def attend_within(resources, ctx) -> None:
    given = [mark(rid) + index for rid in ctx.request_ids for index in range(SPAN)]
    tokens = torch.tensor(padded(ctx, given))
    given = tokens[:, None, None].expand(-1, 1, 4)
    mixed = resources["ragged"].attend(given, given, given)
    assert len(mixed) == len(tokens)


RAGGED = ResourceCase(
    step=lambda rids: {"ragged": RaggedStep(segments(rids))},
    read=lambda resources, rid: None,
    compute=attend_within,
    row_tokens=SPAN,
)


def ragged_factory():
    return built(RaggedAttentionSpec("ragged", NODES))


def position_fork(rid):
    fork = Fork(rid, "main", "branch")
    return {"positions": PositionStep(segments((rid,), label="branch"), pre_forks=(fork,))}


def next_positions(resources, rid):
    positions = resources["positions"]
    labels = positions.publish(rid) or {}
    step = PositionStep(tuple(Segment(rid, 2, label) for label in labels))
    return positions.plan(step, StepContext((rid,), "walk")).tolist()


POSITIONS = ResourceCase(
    step=lambda rids: {"positions": PositionStep(segments(rids))},
    read=next_positions,
    row_tokens=SPAN,
    fork=position_fork,
)


def positions_factory():
    return built(PositionSpec("positions", NODES))


def blocks_factory():
    return built(PositionSpec("positions", NODES, PositionScheme.BLOCK, block_step=2))


def logits_of(rids) -> torch.Tensor:
    rows = [torch.arange(VOCAB) * mark(rid) for rid in rids]
    return torch.stack(rows).cos() if rows else torch.zeros(0, VOCAB)


def sample(resources, ctx) -> None:
    logits = logits_of(ctx.request_ids)
    rows = padded(ctx, list(logits), times=1)
    resources["sampler"].sample(torch.stack([logits.new_zeros(VOCAB) + row for row in rows]))


def draws(resources, rid):
    """The tokens that the next step would draw."""
    sampler, ctx = resources["sampler"], StepContext((rid,), "walk")
    step = SamplerStep((rid,))
    sampler.admit(step, ctx)
    ctx.plan_results["sampler"] = sampler.plan(step, ctx)
    sampler.begin(step, ctx)
    tokens = [sampler.sample(shift + logits_of((rid,))).tolist() for shift in (0, 1)]
    sampler.unadmit(step, ctx)
    return tokens


SAMPLER = ResourceCase(
    step=lambda rids: {"sampler": SamplerStep(rids)},
    read=draws,
    compute=sample,
    row_tokens=1,
    configs=lambda rid: {
        "sampler": SamplerConfig(
            RowFilter(1.0), seed=int(mark(rid)), penalties=Penalties(frequency=3.0)
        )
    },
)


def sampler_factory():
    return built(SamplerSpec("sampler", NODES, VOCAB))


BLOCKS = {"recurrent": StateBlock((2, 3)), "convolution": StateBlock((4,), torch.float64)}


def recur(resources, ctx) -> None:
    """Each layer's state is halved and takes its row's number."""
    state = resources["state"]
    for label in ctx.plan_results["state"].by_label:
        state.select(label)
        for layer in range(2):
            here = state.next_layer()
            marks = [mark(row.request_id) for row in here.rows.rows]
            marks = torch.tensor(padded(ctx, marks, times=1))
            for name, block in BLOCKS.items():
                old = here.read(name)
                shape = (-1,) + (1,) * len(block.shape)
                here.write(name, old / 2 + (marks + layer).reshape(shape))


def read_state(resources, rid):
    return {
        label: {name: block.tolist() for name, block in blocks.items()}
        for label, blocks in resources["state"].contents(rid).items()
    }


RECURRENT = ResourceCase(
    step=lambda rids: {"state": StateStep(segments(rids))},
    read=read_state,
    compute=recur,
    row_tokens=SPAN,
    fork=lambda rid: {
        "state": StateStep(
            segments((rid,), label="branch"), pre_forks=(Fork(rid, "main", "branch"),)
        )
    },
    tags=frozenset({KV_TAG}),
)


def recurrent_factory():
    return built(RecurrentStateSpec("state", NODES, BLOCKS, 2, max_slots=6, num_host_slots=4))


TENSORS = {"latent": StateBlock((3, 2)), "count": StateBlock((), torch.int64)}


def refine(resources, ctx) -> None:
    state = resources["state"]
    state.write("latent", state.read("latent") * 2 + 1)
    state.write("count", state.read("count") + 1)


SLOTS = ResourceCase(
    step=lambda rids: {"state": StateStep(segments(rids, span=1))},
    read=read_state,
    compute=refine,
    row_tokens=1,
    configs=lambda rid: {"state": SlotStateConfig({"latent": torch.full((3, 2), mark(rid))})},
    tags=frozenset({KV_TAG}),
)


def slots_factory():
    return built(SlotStateSpec("state", NODES, TENSORS, max_slots=6, num_host_slots=4))


CASES = {
    "kv": (kv_factory, KV),
    "attention": (attention_factory, ATTENTION),
    "cross attention": (cross_factory, CROSS),
    "joint attention": (joint_factory, JOINT),
    "ragged attention": (ragged_factory, RAGGED),
    "positions": (positions_factory, POSITIONS),
    "block positions": (blocks_factory, POSITIONS),
    "sampler": (sampler_factory, SAMPLER),
    "recurrent state": (recurrent_factory, RECURRENT),
    "slot state": (slots_factory, SLOTS),
}
