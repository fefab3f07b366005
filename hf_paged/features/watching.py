"""Third-party code in a model, as the core asks about it."""

from hf_paged.features.watch.foreign import METHODS as METHODS
from hf_paged.features.watch.foreign import bare_copy as bare_copy
from hf_paged.features.watch.foreign import foreign_code as foreign_code
from hf_paged.features.watch.foreign import replaced_method as replaced_method
from hf_paged.features.watch.foreign import stranger as stranger
