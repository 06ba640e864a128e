-- A site that lets no job be queued again, whatever it asks for. Read only with `--strip-requeue on`.
function slurm_job_submit(job_desc, part_list, submit_uid)
   job_desc.requeue = 0
   return slurm.SUCCESS
end

function slurm_job_modify(job_desc, job_rec, part_list, modify_uid)
   return slurm.SUCCESS
end
