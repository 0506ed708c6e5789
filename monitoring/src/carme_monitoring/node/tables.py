"""The metrics of a node's GPUs, jobs, steps and training: their names, their texts, and their values."""

from carme_monitoring.families import LabelledValues, Table, Value
from carme_monitoring.gpus import GpuReading
from carme_monitoring.jobs import RankProgress, StepUsage, Usage

__all__ = ["GPU", "JOB", "JOB_GPU", "STEP", "TRAINING"]

GPU: Table[GpuReading] = (
    Value("utilization_ratio", "Share of time in which a kernel ran.", lambda gpu: gpu.utilization),
    Value(
        "memory_activity_ratio",
        "Share of time in which its memory was read or written.",
        lambda gpu: gpu.memory_activity,
    ),
    Value("memory_used_bytes", "Memory in use.", lambda gpu: gpu.memory_used_bytes),
    Value("memory_total_bytes", "Memory that it has.", lambda gpu: gpu.memory_total_bytes),
    Value("power_watts", "Power that it draws.", lambda gpu: gpu.power_watts),
    Value("power_limit_watts", "Power that it may draw.", lambda gpu: gpu.power_limit_watts),
    LabelledValues("temperature_celsius", "Temperature.", "sensor", lambda gpu: gpu.temperatures),
    LabelledValues("clock_hertz", "Clock.", "clock", lambda gpu: gpu.clocks_hertz),
    LabelledValues(
        "activity_ratio",
        "Share of the GPU in use, by unit, where it measures itself.",
        "unit",
        lambda gpu: gpu.activity,
    ),
    LabelledValues(
        "throttled", "1 while this reason slows the clocks down.", "reason", lambda gpu: gpu.throttled
    ),
    LabelledValues(
        "remapped_rows",
        "Rows of memory that were replaced, or wait for it.",
        "kind",
        lambda gpu: gpu.remapped_rows,
    ),
    Value(
        "energy_joules", "Energy since the driver was loaded.", lambda gpu: gpu.energy_joules, is_counter=True
    ),
    LabelledValues(
        "ecc_errors",
        "Memory errors since the driver was loaded.",
        "kind",
        lambda gpu: gpu.ecc_errors,
        is_counter=True,
    ),
    LabelledValues(
        "xid_errors",
        "Errors that the driver reported since the exporter began.",
        "xid",
        lambda gpu: gpu.xids,
        is_counter=True,
    ),
    LabelledValues(
        "nvlink_bytes", "Data over all NVLinks.", "direction", lambda gpu: gpu.nvlink_bytes, is_counter=True
    ),
)
JOB_GPU: Table[GpuReading] = (
    Value(
        "utilization_ratio",
        "Share of time in which the job's GPU ran a kernel.",
        lambda gpu: gpu.utilization,
    ),
    LabelledValues(
        "activity_ratio",
        "Share of the job's GPU in use, by unit, where the GPU measures itself.",
        "unit",
        lambda gpu: gpu.activity,
    ),
    Value("memory_used_bytes", "Memory in use on the job's GPU.", lambda gpu: gpu.memory_used_bytes),
    Value("memory_total_bytes", "Memory of the job's GPU.", lambda gpu: gpu.memory_total_bytes),
    Value("power_watts", "Power that the job's GPU draws.", lambda gpu: gpu.power_watts),
)
JOB: Table[Usage] = (
    Value(
        "memory_used_bytes",
        "Memory in use, without page cache that can be given back.",
        lambda job: job.memory_bytes,
    ),
    Value("memory_peak_bytes", "Highest use of memory, with page cache.", lambda job: job.memory_peak_bytes),
    Value("memory_limit_bytes", "Memory that it may use.", lambda job: job.memory_limit_bytes),
    Value("threads", "Threads at this moment.", lambda job: job.threads),
    Value(
        "oom_kills",
        "Processes that the kernel ended for want of memory.",
        lambda job: job.oom_kills,
        is_counter=True,
    ),
    Value("io_read_bytes", "Bytes read from disks.", lambda job: job.read_bytes, is_counter=True),
    Value("io_written_bytes", "Bytes written to disks.", lambda job: job.written_bytes, is_counter=True),
)
STEP: Table[StepUsage] = (
    Value("memory_used_bytes", "Memory in use by a step.", lambda step: step.memory_bytes),
    Value(
        "memory_peak_bytes",
        "Highest use of memory by a step, with page cache.",
        lambda step: step.memory_peak_bytes,
    ),
    Value("threads", "Threads of a step at this moment.", lambda step: step.threads),
    Value("cpu_seconds", "Processor time of a step.", lambda step: step.cpu_seconds, is_counter=True),
    Value(
        "oom_kills",
        "Processes of a step that the kernel ended for want of memory.",
        lambda step: step.oom_kills,
        is_counter=True,
    ),
    Value(
        "io_read_bytes", "Bytes that a step read from disks.", lambda step: step.read_bytes, is_counter=True
    ),
    Value(
        "io_written_bytes",
        "Bytes that a step wrote to disks.",
        lambda step: step.written_bytes,
        is_counter=True,
    ),
)
TRAINING: Table[RankProgress] = (
    Value("seconds", "Time since the rank's first step.", lambda rank: rank.seconds, is_counter=True),
    Value("steps", "Steps of the optimizer.", lambda rank: rank.steps, is_counter=True),
    Value("samples", "Samples that the rank has used.", lambda rank: rank.samples, is_counter=True),
    LabelledValues(
        "wait_seconds",
        "Time for which the rank waited: for data (its loader), or for other ranks.",
        "cause",
        lambda rank: rank.wait,
        is_counter=True,
    ),
    Value("loss", "The rank's last loss.", lambda rank: rank.loss),
    Value("ranks", "Ranks of the whole run.", lambda rank: rank.size),
)
