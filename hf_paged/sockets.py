"""The sockets of an engine: what may be plugged into the core, and when the core calls it. Read this first.

A way to compute a model is an `Executor`. A feature that needs more than block tables is a `SideMemory`. An order of
requests is a `Policy`; of blocks, an `Eviction`. What a request wants of the model's output is a `Task`. The core knows
only these, so a new one changes no line of it: it is a file of its own, and a line of a table, `POLICIES`, `EVICTIONS`,
`TASKS`, or `SIDE_MEMORIES` (`features/executors.py`, whose `bind` chooses executors). The thread that runs a step, or
makes a change between two steps, calls all of them. Evictions, the methods of a Policy, and those of a SideMemory that
the scheduler calls, must not raise, because an error would break off the step.

A `Group` is a request as the scheduler sees it (`hf_paged.generation.requests.sequence.SequenceGroup`), with its
`request_id`, `client`, `priority`, `arrival`, `live` (its sequences) and `width` (how many it may have). A `Plan` is a
list of (sequence, number of tokens). An `Output` is one step as data
(`hf_paged.generation.engine.tables.SchedulerOutput`). Standard library only.
"""

from __future__ import annotations

from hf_paged.executor import Executor as Executor
from hf_paged.executor import Parts as Parts
from hf_paged.executor import Results as Results
from hf_paged.policies import EVICTIONS as EVICTIONS
from hf_paged.policies import POLICIES as POLICIES
from hf_paged.policies import Eviction as Eviction
from hf_paged.policies import Policy as Policy
from hf_paged.side_memory import Attachment as Attachment
from hf_paged.side_memory import Group as Group
from hf_paged.side_memory import Inputs as Inputs
from hf_paged.side_memory import Output as Output
from hf_paged.side_memory import Plan as Plan
from hf_paged.side_memory import SideMemory as SideMemory
from hf_paged.tasks import TASKS as TASKS
from hf_paged.tasks import Task as Task
