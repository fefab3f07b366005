"""The parts of an engine that are features, under the names by which `Engine` knows them."""

from hf_paged.features.adapters.adapters import Adapters
from hf_paged.features.graphs.graphs import graphed_steps as graphed_steps
from hf_paged.features.graphs.warmup import warm_up as warm_up
from hf_paged.features.new_weights.methods import WeightMethods as WeightMethods
from hf_paged.features.ranks.parallel import check_parallel as check_parallel
from hf_paged.features.ranks.parallel import make_runner as make_runner
from hf_paged.features.speculation.draft_model import close_drafter as close_drafter
from hf_paged.features.speculation.draft_model import make_drafter as make_drafter
from hf_paged.features.speculation.drafts import Drafter as Drafter
from hf_paged.features.speculation.speculation import Speculation
from hf_paged.features.tasks.methods import TaskMethods as TaskMethods

ModelVariants, Drafting = Adapters, Speculation
