"""Rollout: rows in, checked trajectories out.

Reading order: ``executor`` (what the trainer calls), ``dispatcher`` (what starts when), ``groups`` (how one row is
run), ``staleness`` (how many may be under way, and which make up a step), ``rows`` (where rows come from and how they
end).
"""
