"""SPMD launchers: ``python -m areal.infra.launcher.{local,ray,slurm} script.py --config c.yaml key=value …``.

They run the same script once per rank, beside its rollout workers, as releases before the single controller did.
``python script.py --config c.yaml scheduler.type={local,ray,slurm}`` is the current way.

    launcher ── scheduler ──► worker actor/i ── starts ──► script, rank i
                         └──► worker rollout/j

Workers are those of the scheduler that the launcher is named after. The script of rank 0 controls all of them
(``areal.infra.scheduler.attached``); the scripts of other ranks wait for it (``areal.trainer.follower``).
"""
