"""Engines that run trainers on other machines: Slurm, Ray, Kubernetes.

    protocol.py         what Accrue needs of an engine
    process.py, slurm.py, ray_cluster.py, kubernetes.py    the engines
    choose.py           the engine that the settings name
    remote_trainer.py   on the worker's side: a trainer in an engine, for the supervisor like one of its own
    node.py             on a node's side: starts the trainer there, and ends it with its worker
    shared_files.py     the files through which both sides communicate

The service keeps the queue and its guarantees; an engine only places and runs processes. Worker and nodes
share the data folder, at the same path.
"""
