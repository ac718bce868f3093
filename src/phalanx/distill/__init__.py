"""On-policy distillation with phases: rollouts, deferred scoring of whole batches, and the loss.

```python
from phalanx.client import AsyncRoleClient
from phalanx.distill import DeferredBatch, DiskStore, Prompt, RolloutSettings, RolloutWorkload
```

Nothing here loads torch but `phalanx.distill.batch_tensors` and `phalanx.distill.loss`, which are
imported by their own names.
"""

from phalanx.distill.asking import AskingSettings
from phalanx.distill.deferred_batch import DeferredBatch
from phalanx.distill.loop import DistillLoop, LoopParts, LoopPlan
from phalanx.distill.loop_events import (
    LoopEvent,
    PhaseEntered,
    SamplesDone,
    StepEnded,
    StepTrained,
    WeightsPushed,
)
from phalanx.distill.prefill import ChosenIds
from phalanx.distill.rollout import Grading, Prompt, RolloutSettings
from phalanx.distill.sample import Sample, TeacherRequest, TeacherScores, TokenSelection
from phalanx.distill.scoring import ScorerSettings, StudentScorer, TeacherScorer
from phalanx.distill.stores.base import SampleStore, Scoring, Stage, StoredBatch
from phalanx.distill.stores.disk_store import DiskStore
from phalanx.distill.stores.memory_store import MemoryStore
from phalanx.distill.support import fields_of
from phalanx.distill.token_table import SupportTable, TokenTable
from phalanx.distill.training import Checkpoint, NoPhases, Phases, Trainer, WeightSink
from phalanx.distill.weights import EngineWeights, RoleWeights
from phalanx.distill.workload import RolloutWorkload

__all__ = [
    "AskingSettings",
    "Checkpoint",
    "ChosenIds",
    "DeferredBatch",
    "DiskStore",
    "DistillLoop",
    "EngineWeights",
    "Grading",
    "LoopEvent",
    "LoopParts",
    "LoopPlan",
    "MemoryStore",
    "NoPhases",
    "PhaseEntered",
    "Phases",
    "Prompt",
    "RoleWeights",
    "RolloutSettings",
    "RolloutWorkload",
    "Sample",
    "SampleStore",
    "SamplesDone",
    "ScorerSettings",
    "Scoring",
    "Stage",
    "StepEnded",
    "StepTrained",
    "StoredBatch",
    "StudentScorer",
    "SupportTable",
    "TeacherRequest",
    "TeacherScorer",
    "TeacherScores",
    "TokenSelection",
    "TokenTable",
    "Trainer",
    "WeightSink",
    "WeightsPushed",
    "fields_of",
]
