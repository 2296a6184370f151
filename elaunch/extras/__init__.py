"""Tools beside the launcher: no run needs any of them, and only the command line imports them.

=============  ===================================================================================
manifest       `elaunch manifest`: a command line becomes the job file of a scheduler
schedulers     the job files of Slurm, Kubernetes, JobSet and Kubeflow
completion     `elaunch man`, and words for the shell's completion
otlp           `elaunch otlp`: metrics and traces of runs for an OpenTelemetry collector
=============  ===================================================================================
"""

__all__ = ["completion", "manifest", "otlp"]
