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
        num_pages=20,
        page_size=4,
        max_seq_len=64,
        dtype=torch.float32,
        host_pages=8,
    )
    return KVConfig(**{**made, **options})


def write_kv(resources, ctx) -> None:
    """Every new token is its request's number and its place."""
    plan = ctx.plan_results["kv"]
    for label, paged in plan.by_label.items():
        at = 0
        for row, start in zip(plan.rows[label], plan.starts[label], strict=True):
            slots = paged.slots[at : at + row.span]
            at += row.span
            values = mark(row.request_id) + 0.01 * torch.arange(start, start + row.span)
            for layer in range(2):
                for part in resources["kv"].layer(layer):
                    part.flatten(0, 1)[slots] = values[:, None, None]


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
    rows = plan.rows.get("main", ())
    tokens = [
        mark(row.request_id) + 0.1 * (start + index)
        for row, start in zip(rows, plan.starts.get("main", ()), strict=True)
        for index in range(row.span)
    ]
    qkv = torch.tensor(tokens)[:, None].sin() * torch.arange(1.0, width + 1)
    rotary = torch.ones(len(tokens), 2), torch.zeros(len(tokens), 2)
    for _ in range(2):
        mixed = resources["attention"].attend(qkv, HEADS, rotary)
        assert torch.isfinite(mixed).all()


ATTENTION = ResourceCase(
    step=lambda rids: {"kv": KVStep(segments(rids)), "attention": AttentionStep()},
    read=read_kv,
    compute=attend,
)


def attention_factory():
    return built(
        KVSpec("kv", NODES, kv_config()), AttentionSpec("attention", NODES, "kv", TorchOperators())
    )


def write_context(resources, ctx) -> None:
    plan, cross = ctx.plan_results["kv"], resources["cross"]
    rows = plan.rows.get("context", ())
    tokens = [
        mark(row.request_id) + 0.1 * (start + index)
        for row, start in zip(rows, plan.starts.get("context", ()), strict=True)
        for index in range(row.span)
    ]
    values = torch.tensor(tokens)[:, None, None].expand(-1, 1, 4)
    for layer in range(2):
        cross.write(values, -values)
        queries = torch.ones(2 * len(rows), 2, 4)
        mixed = cross.attend(queries)
        lowest = [-mark(row.request_id) - 0.1 * 30 for row in rows for _ in range(2)]
        assert (mixed[:, 0] >= torch.tensor(lowest)).all(), "somebody else's context"


CROSS = ResourceCase(
    step=lambda rids: {
        "kv": KVStep(segments(rids, label="context")),
        "cross": CrossAttentionStep(segments(rids, span=2)),
    },
    read=read_kv,
    compute=write_context,
)


def cross_factory():
    return built(
        KVSpec("kv", NODES, kv_config()), CrossAttentionSpec("cross", NODES, "kv", TorchOperators())
    )


def attend_within(resources, ctx) -> None:
    tokens = torch.tensor([mark(rid) + i for rid in ctx.request_ids for i in range(SPAN)])
    given = tokens[:, None, None].expand(-1, 1, 4)
    mixed = resources["ragged"].attend(given, given, given)
    assert len(mixed) == len(tokens)


RAGGED = ResourceCase(
    step=lambda rids: {"ragged": RaggedStep(segments(rids))},
    read=lambda resources, rid: None,
    compute=attend_within,
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
    resources["sampler"].sample(logits_of(ctx.request_ids))


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
            marks = torch.tensor([mark(row.request_id) for row in here.rows.rows])
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
    configs=lambda rid: {"state": SlotStateConfig({"latent": torch.full((3, 2), mark(rid))})},
    tags=frozenset({KV_TAG}),
)


def slots_factory():
    return built(SlotStateSpec("state", NODES, TENSORS, max_slots=6, num_host_slots=4))


CASES = {
    "kv": (kv_factory, KV),
    "attention": (attention_factory, ATTENTION),
    "cross attention": (cross_factory, CROSS),
    "ragged attention": (ragged_factory, RAGGED),
    "positions": (positions_factory, POSITIONS),
    "block positions": (blocks_factory, POSITIONS),
    "sampler": (sampler_factory, SAMPLER),
    "recurrent state": (recurrent_factory, RECURRENT),
    "slot state": (slots_factory, SLOTS),
}
