-- Anyone who asks for GPUs and names no partition means the one that has them.
function slurm_job_submit(job, partitions, uid)
   local gres = job.tres_per_node or job.tres_per_job or job.tres_per_task
   if job.partition == nil and gres ~= nil and string.find(gres, "gpu") then
      job.partition = "gpu"
   end
   if job.comment == nil then
      job.comment = "by job_submit.lua"
   end
   return slurm.SUCCESS
end

function slurm_job_modify(job, record, partitions, uid)
   return slurm.SUCCESS
end

return slurm.SUCCESS
