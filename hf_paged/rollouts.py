"""Rollouts of a training run, drawn by an engine on the model that is trained, in the trainer's own process.

rollout_func   for TRL's trainers that take one
attach         for every trainer of TRL that generates
Rollouts       what `attach` returns: draws completions, for rollout functions of your own
"""

from hf_paged.bridges.rollouts import Rollouts, attach, rollout_func

__all__ = ["Rollouts", "attach", "rollout_func"]
