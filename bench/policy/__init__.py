"""How well the planner chooses: every candidate timed, chosen and best head to head, predicted beside measured."""
