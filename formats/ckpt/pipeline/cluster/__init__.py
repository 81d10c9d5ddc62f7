"""Clusters whose workers write the files of a job: Dask and Ray, behind one small interface.

    by_url         the cluster at a URL
    cluster        what a cluster does, whichever it is
    distribute     the coordinator: which task runs when, what is started once more, the progress
    worker         what runs on a worker: lay files out, write them, return their receipts
    dask_cluster   Dask
    ray_cluster    Ray

A cluster only has to run a function of plain data somewhere, perhaps several times. It needs no file of its own, and
neither knows what a checkpoint is.
"""

from ckpt.pipeline.cluster.by_url import connect
from ckpt.pipeline.cluster.cluster import Cluster

__all__ = ["Cluster", "connect"]
