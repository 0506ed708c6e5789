"""Advice in the forms that ask for GPUs: what a probe's result says of each choice of nodes and GPUs."""

from carme_webui.scaling.advice import Advice, advice, starts
from carme_webui.scaling.fields import SCALING, ScalingFields
from carme_webui.scaling.probes import Probe, curve_of, probe_files

__all__ = ["SCALING", "Advice", "Probe", "ScalingFields", "advice", "curve_of", "probe_files", "starts"]
