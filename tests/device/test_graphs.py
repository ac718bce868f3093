"""Captured computations: what a CPU's tape and its debugging twin do, and the same on CUDA."""

from __future__ import annotations

import pytest
import torch

from phalanx.device import create_backend
from phalanx.device.cpu import CpuBackend
from phalanx.device.cuda import CudaBackend
from phalanx.device.dispatch_tape import DispatchTape
from phalanx.errors import ConfigurationError, PhalanxError

needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device; none is visible to torch"
)


def tape():
    return CpuBackend(capture="tape").create_graph()


@pytest.fixture(params=["tape", "rerun"])
def graph(request):
    return CpuBackend(capture=request.param).create_graph()


def test_a_replay_computes_from_what_the_inputs_hold_now(graph):
    x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
    out = graph.capture(lambda: {"y": (x @ weight).relu() + 1})["y"]
    assert out.tolist() == [[12.0]]
    address = out.data_ptr()
    for values, expected in (([[0.5, 0.25]], 3.5), ([[-9.0, 0.0]], 1.0)):
        x.copy_(torch.tensor(values))
        graph.replay()
        assert out.tolist() == [[expected]]
        assert out.data_ptr() == address


def test_mutations_run_again_and_views_do_not(graph):
    pool, slots, x = torch.zeros(4, 2), torch.tensor([1]), torch.ones(1, 2)

    def write():
        flat = pool.view(2, 2, 2).flatten(0, 1)
        flat.index_copy_(0, slots, x)
        doubled = flat.reshape(-1)[2:4]
        return {"seen": doubled.mul_(2).sum()}

    out = graph.capture(write)["seen"]
    slots.fill_(3)
    pool.zero_()
    x.fill_(5.0)
    graph.replay()
    assert pool.tolist() == [[0, 0], [0, 0], [0, 0], [5, 5]]
    assert out.item() == 0


def test_the_tape_keeps_no_views():
    graph, x = tape(), torch.arange(6.0)
    graph.capture(lambda: {"y": x.view(2, 3).transpose(0, 1).reshape(6)[1:].unsqueeze(0) + 1})
    assert len(graph) == 2, "the reshape copies, the sum is new"


def test_host_values_are_baked_by_the_tape_and_not_by_the_rerun():
    scale = [2.0]
    results = {}
    for mode in ("tape", "rerun"):
        graph, x = CpuBackend(capture=mode).create_graph(), torch.ones(2)
        out = graph.capture(lambda x=x: {"y": x * scale[0]})["y"]
        scale[0] = 3.0
        graph.replay()
        results[mode] = out.tolist()
        scale[0] = 2.0
    assert results == {"tape": [2.0, 2.0], "rerun": [3.0, 3.0]}


def test_a_replay_runs_no_python_of_the_captured_code():
    graph, x, calls = tape(), torch.ones(2), []

    def compute():
        calls.append(None)
        return {"y": torch.nn.functional.layer_norm(x, (2,)) + torch.softmax(x, 0)}

    graph.capture(compute)
    graph.replay()
    assert len(calls) == 1


def test_random_operations_draw_again():
    graph = tape()
    out = graph.capture(lambda: {"r": torch.rand(8)})["r"]
    first = out.clone()
    graph.replay()
    assert not torch.equal(out, first)


def test_attention_is_recorded():
    graph, q = tape(), torch.randn(1, 2, 3, 4)
    attend = torch.nn.functional.scaled_dot_product_attention
    mask = torch.ones(3, 3, dtype=torch.bool).tril()
    with torch.inference_mode():
        out = graph.capture(lambda: {"y": attend(q, q, q, attn_mask=mask)})["y"]
        q.normal_()
        graph.replay()
        assert torch.equal(out, attend(q, q, q, attn_mask=mask))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: bool((x > 0).all()),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: torch.masked_select(x, x > 0),
        lambda x: torch.equal(x, x),
    ],
)
def test_a_value_read_by_the_host_is_refused(read):
    backend, x = CpuBackend(capture="tape"), torch.ones(3)
    with pytest.raises(ConfigurationError, match="inside a capture waits for a value"):
        backend.create_graph().capture(lambda: {"y": torch.as_tensor(read(x))})
    assert not backend.capturing
    assert x.sum().item() == 3, "outside it is as ever"


def test_captures_do_not_nest(graph):
    backend = CpuBackend(capture="tape")

    def nested():
        assert backend.capturing
        return backend.create_graph().capture(lambda: {"y": torch.ones(1)})

    with pytest.raises(ConfigurationError, match="inside a capture; capture a part"):
        backend.create_graph().capture(nested)
    assert not backend.capturing


def test_a_failed_capture_leaves_nothing_to_replay(graph):
    def fail():
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        graph.capture(fail)
    with pytest.raises(PhalanxError, match="before it was captured"):
        graph.replay()


def test_recorded_tensors_stay_alive():
    graph, x = tape(), torch.ones(3)

    def compute():
        return {"y": x * torch.full((3,), 2.0)}

    out = graph.capture(compute)["y"]
    torch.full((3,), 9.0)
    x.fill_(2.0)
    graph.replay()
    assert out.tolist() == [4.0, 4.0, 4.0]


def test_a_cpu_captures_only_when_asked_to():
    assert not create_backend("cpu").captures
    with pytest.raises(ConfigurationError, match="does not capture; create it with"):
        create_backend("cpu").create_graph()
    assert isinstance(create_backend("cpu", capture="tape").create_graph(), DispatchTape)
    with pytest.raises(ConfigurationError, match="allowed: off, tape, rerun"):
        create_backend("cpu", capture="graph")


def test_streams_of_a_cpu_are_in_order_by_themselves():
    backend = create_backend("cpu")
    with backend.on_stream(backend.stream()):
        event = backend.record_event()
    backend.wait_event(event)
    assert backend.alloc_host((2, 3), torch.int32).shape == (2, 3)


@needs_cuda
def test_cuda_graphs_replay_on_the_same_addresses():
    backend = create_backend("cuda")
    assert isinstance(backend, CudaBackend)
    x, weight = (torch.ones(4, 4, device=backend.device) for _ in range(2))
    (x @ weight).relu()
    graph = backend.create_graph()
    with torch.inference_mode():
        out = graph.capture(lambda: {"y": (x @ weight).relu() * 2})["y"]
        x.fill_(3.0)
        graph.replay()
    assert out.cpu().tolist() == [[24.0] * 4] * 4


@needs_cuda
def test_cuda_refuses_a_value_read_by_the_host():
    backend = create_backend("cuda")
    x = torch.ones(4, device=backend.device)
    with pytest.raises(ConfigurationError, match="cannot be captured"):
        backend.create_graph().capture(lambda: {"y": x * x.sum().item()})
    assert not backend.capturing
    assert x.sum().item() == 4, "outside it is as ever"


@needs_cuda
def test_cuda_goes_on_after_a_capture_that_broke():
    backend = create_backend("cuda")
    x, runs = torch.ones(4, device=backend.device), []

    def breaks():
        runs.append(None)
        return {"y": x * (x.sum().item() if len(runs) > 1 else 1.0)}

    with pytest.raises(ConfigurationError, match="cannot be captured"):
        backend.create_graph().capture(breaks)
    default = torch.cuda.default_stream(backend.device)
    assert torch.cuda.current_stream(backend.device) == default
    graph = backend.create_graph()
    with torch.inference_mode():
        out = graph.capture(lambda: {"y": x * 2})["y"]
        x.fill_(3.0)
        graph.replay()
    assert out.cpu().tolist() == [6.0] * 4


@needs_cuda
def test_cuda_streams_wait_for_each_other():
    backend = create_backend("cuda")
    side, x = backend.stream(), torch.zeros(1 << 20, device=backend.device)
    zeroed = backend.record_event()
    with backend.on_stream(side):
        backend.wait_event(zeroed)
        for _ in range(50):
            x.add_(1.0)
        event = backend.record_event()
    backend.wait_event(event)
    assert (x * 1.0).sum().item() == 50 * (1 << 20)
