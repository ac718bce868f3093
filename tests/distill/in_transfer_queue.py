"""Run in the environment of TransferQueue: the contract of a store there, against the real thing, and
rows for the queue's own readers. Prints what was done.
"""

from __future__ import annotations

import json
import os

os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"

import ray
import torch
import transfer_queue
from omegaconf import OmegaConf

from phalanx.distill import Scoring, Stage, StoredBatch
from phalanx.distill.stores.queue_rows import QueueRows
from phalanx.distill.stores.transfer_queue_store import TransferQueueStore
from phalanx.errors import SampleStoreError
from phalanx.testing.sample_store_conformance import check_sample_store, scored, stored_samples


def main() -> None:
    ray.init(
        num_cpus=8,
        include_dashboard=False,
        address="local",
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        # Eight workers that would run nothing: the queue has actors, each with a process of its own.
        _system_config={"prestart_worker_first_driver": False},
    )
    units = {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}
    transfer_queue.init(OmegaConf.create(units))
    try:
        done = {name: check() for name, check in CHECKS.items()}
    finally:
        transfer_queue.close()
        ray.shutdown()
    print(json.dumps(done))


def conformance() -> str:
    check_sample_store(TransferQueueStore("plain"))
    check_sample_store(TransferQueueStore("reopened"), lambda store: TransferQueueStore("reopened"))
    return "ok"


def bounds() -> str:
    store = TransferQueueStore("bounded", max_batches=1)
    store.save(StoredBatch(batch_id="a", stage=Stage.COLLECTING))
    try:
        store.save(StoredBatch(batch_id="b", stage=Stage.COLLECTING))
    except SampleStoreError:
        return "ok"
    return "two batches"


def leftovers() -> str:
    """A consumed batch leaves its head alone, and no record, also none of a process that ended before
    it had dropped an earlier one.
    """
    store = TransferQueueStore("left")
    publish(store)
    data = {"data": torch.zeros(3, dtype=torch.uint8)}
    transfer_queue.kv_put("save/one/0", "left", fields=data)
    transfer_queue.kv_put("save/one-more/1", "left", fields=data)
    store.consume("one")
    return str(sorted(transfer_queue.kv_list("left")["left"]))


def rows() -> dict[str, object]:
    """What a reader of the queue finds after publication, and nothing before."""
    store = TransferQueueStore("rows", publish_rows=QueueRows("train"))
    before = transfer_queue.kv_list("train")
    publish(store)
    tags = transfer_queue.kv_list("train")["train"]
    keys = sorted(tags)
    found = transfer_queue.kv_batch_get(keys, "train")
    return {
        "before": before,
        "keys": keys,
        "last": [tags[key]["is_last"] for key in keys],
        "columns": sorted(found.keys()),
        "responses": [one.tolist() for one in found["response_ids"]],
        "teacher": [round(float(one[0]), 3) for one in found["teacher_log_probs"]],
        "support": [list(one.shape) for one in found["opd_topk_token_ids"]],
    }


def publish(store: TransferQueueStore) -> None:
    samples = tuple(scored(one, -1.0 - at) for at, one in enumerate(stored_samples()))
    needs = (Scoring.TEACHER,)
    store.save(
        StoredBatch(batch_id="one", stage=Stage.VALIDATED, needs=needs, done=needs, samples=samples)
    )
    assert store.publish("one")


CHECKS = {"conformance": conformance, "bounds": bounds, "leftovers": leftovers, "rows": rows}

if __name__ == "__main__":
    main()
