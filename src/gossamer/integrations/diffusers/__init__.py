"""Sparse attention inside diffusers' pipelines.

`attach.attach` is the way in. What it does to a model, and nothing else:

* the processors of its self-attention modules get a subclass of their class and a dispatch backend
  of their own (`processor.py`, `backend.py`), so that each call reaches the session as one opaque
  operator;
* its root gets a hook that hears which pass and which generation is run (`hook.py`, `passes.py`,
  `progress.py`) and publishes the latent grid (`families.py`).

Every family of models differs in one entry of `families.FAMILIES` only.
"""
