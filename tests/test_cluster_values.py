"""What cluster.* may not hold, each refusal by its key and with what to do."""

import pytest

from ftslurm.errors import SpecError
from ftslurm.run.spec import ClusterSpec
from ftslurm.submit import further_options
from ftslurm.submit.cluster_values import check_cluster


def refused(**values):
    with pytest.raises(SpecError) as caught:
        check_cluster(ClusterSpec(**values))
    said = str(caught.value)
    assert said.isprintable() and len(said) < 400
    return said


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--nodes=3", "use cluster.nodes"),
        ("--partition=gpu", "use cluster.partition"),
        ("--time=1", "use cluster.time"),
        ("--gpus=8", "use cluster.gpus_per_node"),
        ("--requeue", "recovery.continue_by"),
        ("--no-requeue", "recovery.continue_by"),
        ("--array=0-3", "a run is one job"),
        ("--het-group=0", "heterogeneous"),
        (":", "heterogeneous"),
        ("hetjob", "heterogeneous"),
        ("--ntasks=7", "the same number of ranks"),
        ("--ntasks-per-gpu=1", "the same number of ranks"),
        ("--distribution=arbitrary", "one node after the other"),
        ("--distribution=cyclic", "one node after the other"),
        ("--di=plane=2", "one node after the other"),
        ("--no-kill", "outlives a lost node"),
        ("--wrap=id", "the batch script is ftslurm's own"),
        ("--output=x", "the logs are in the run directory"),
        ("--clusters=b", "this cluster only"),
        # getopt_long would take these for the ones above.
        ("--part=gpu", "it may be read as `--partition`"),
        ("--no-req", "it may be read as `--no-requeue`"),
        ("--ti=3", "it may be read as `--time`"),
        # No option, or two.
        ("-N3", "two dashes"),
        ("--gres gpu:1", "two dashes"),
        ("exclusive", "two dashes"),
        ("--", "two dashes"),
        ("--Exclusive", "two dashes"),
    ],
)
def test_an_option_of_sbatch_that_would_be_lost_or_break_the_run_is_refused(option, says):
    said = refused(sbatch=["--exclusive", option])
    assert said.startswith("cluster.sbatch has `") and says in said


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--nodelist=n1", "rank 0 has to be where the batch script is"),
        ("--relative=1", "rank 0 has to be where the batch script is"),
        ("--wait=3", "use cluster.wait_s"),
        ("--kill-on-bad-exit=0", "it is on"),
        ("--multi-prog", "the same program"),
        ("--container-image=x", "use cluster.container_image"),
        ("--container-mounts=x", "use cluster.mounts"),
        ("--mpi=pmix", "use cluster.mpi"),
        ("--export=NONE", "use cluster.export"),
        ("--pty", "read nothing from a terminal"),
        ("--chdir=/", "the run's frozen code"),
    ],
)
def test_an_option_of_srun_that_would_be_lost_or_break_the_run_is_refused(option, says):
    said = refused(srun=[option])
    assert said.startswith("cluster.srun has `") and says in said


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("sbatch", ["--exclusive", "--gres=gpu:h100:8", "--nodelist=n[1-3]", "--mem-per-cpu=4G"]),
        ("sbatch", ["--distribution=block:cyclic", "--dependency=afterok:12", "--begin=now+60"]),
        ("sbatch", ["--nice=10", "--hint=nomultithread", "--core-spec=1", "--propagate=NONE"]),
        ("srun", ["--exact", "--overlap", "--mem-bind=local", "--container-writable"]),
    ],
)  # fmt: skip
def test_what_no_key_stands_for_is_taken_as_it_is(key, options):
    check_cluster(ClusterSpec(**{key: options}))


def test_no_refused_option_has_a_beginning_that_is_let_through():
    for options, check in (
        (further_options._SBATCH, further_options.check_sbatch),
        (further_options._SRUN, further_options.check_srun),
    ):
        for name in options:
            for end in range(3, len(name) + 1):
                if name[:end] in further_options._TAKEN_AS_WRITTEN:
                    continue
                with pytest.raises(SpecError):
                    check([f"--{name[:end]}=1"])


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"env": {"WANDB_API_KEY": "x"}}, "sets `WANDB_API_KEY`, which looks like a secret"),
        ({"env": {"HF_TOKEN": "x"}}, "sbatch passes your own environment on"),
        ({"env": {"DB_PASSWORD": "x"}}, "looks like a secret"),
        ({"env": {"A": "${oc.env:HF_TOKEN}"}}, "names a secret of the environment"),
        ({"setup": ["export HF_TOKEN=hf_abc"]}, "cluster.setup 1 sets `HF_TOKEN`"),
        ({"setup": ["true", 'AWS_SECRET="abc" x']}, "cluster.setup 2 sets `AWS_SECRET`"),
        ({"container": ["apptainer", "--env=API_KEY=abc"]}, "cluster.container 2 sets `API_KEY`"),
        ({"export": "ALL,MY_TOKEN=abc"}, "cluster.export sets `MY_TOKEN`"),
        ({"srun": ["--export-x=MY_TOKEN=abc"]}, "cluster.srun 1 sets `MY_TOKEN`"),
    ],
)
def test_a_secret_is_kept_out_of_what_is_kept(values, says):
    assert says in refused(**values)
    assert "abc" not in refused(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"env": {"TOKENIZERS_PARALLELISM": "false", "NCCL_IB_PKEY": "1", "AUTHOR": "me"}},
        {"env": {"EMPTY": "", "COMPASS": "n"}},
        {"setup": ["export HF_TOKEN=$(cat ~/.token)", 'export API_KEY="$MY_KEY"', "KEY= true"]},
    ],
)
def test_what_is_no_secret_of_the_text_is_let_through(values):
    check_cluster(ClusterSpec(**values))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"env": {"a b": "1"}}, "no name of a variable"),
        ({"env": {"A=B": "1"}}, "no name of a variable"),
        ({"env": {"BASH_FUNC_x%%": "() { id; }"}}, "no name of a variable"),
        ({"env": {"SLURM_NTASKS": "1"}}, "which Slurm or the batch script sets"),
        ({"env": {"MASTER_ADDR": "n1"}}, "which Slurm or the batch script sets"),
        ({"env": {"PYTHONPATH": "/x"}}, "a line of cluster.setup may export it"),
        ({"env": {"NCCL_PROXY_DUMP_SIGNAL": "10"}}, "SIGUSR1"),
        ({"env": {"NCCL_PROXY_DUMP_SIGNAL": "12"}}, "SIGUSR2"),
        ({"env": {"GLOO_SOCKET_IFNAME": "x"}, "interface": "ib0"}, "cluster.interface sets"),
        ({"env": {"A": "x" * 5000}}, "cluster.env.A has 5000 characters"),
        ({"setup": ["a\nb"]}, "cluster.setup 1 is `a\\nb`; line breaks"),
        ({"setup": ["true"] * 201}, "cluster.setup has 201 entries"),
        ({"container": ["a", ""]}, "cluster.container 2 has 0 characters"),
        ({"gpus_per_node": 4, "gpus_per_task": 1}, "give one"),
        ({"mounts": ["/a:/a"]}, "cluster.mounts is for pyxis and needs cluster.container_image"),
        ({"container_image": "x"}, "needs cluster.rank_python"),
        ({"container_image": "x", "rank_python": "p", "container": ["a"]}, "two ways"),
        ({"container_image": "x", "rank_python": "p", "mounts": ["/a:/a,/b:/b"]}, "each mount"),
        ({"export": "NONE"}, "give ALL"),
        ({"export": "PATH,HOME"}, "give ALL"),
        ({"interface": "ib0,ib1"}, "one interface"),
        ({"interface": "x" * 16}, "one interface"),
        ({"rank_python": "{environment}/bin/python"}, "cluster.environment, which is not set"),
        ({"rank_python": "-c"}, "a path or command is needed"),
        ({"environment_dir": "tmp"}, "beginning with `/`"),
        ({"python": "/a:b"}, "cluster.python leads to `/a:b`"),
        ({"mail_type": "fail"}, "e.g. FAIL,END"),
        ({"mail_user": "a b"}, "write an address"),
        ({"licenses": "a b"}, "NAME:COUNT"),
        ({"switches": "one"}, "COUNT@TIME"),
        ({"gpu_bind": "closest; id"}, "e.g. closest"),
        ({"cpu_bind": "$(id)"}, "e.g. cores"),
        ({"mpi": "pmix=1"}, "name of a plugin"),
    ],
)
def test_a_value_that_its_place_cannot_hold_is_refused_with_the_reason(values, says):
    assert says in refused(**values)


@pytest.mark.parametrize(
    "values",
    [
        {"licenses": "matlab:2,foo@db:1"},
        {"switches": "1@00:10:00"},
        {"mail_user": "a.b+c@example.org", "mail_type": "FAIL,TIME_LIMIT_80"},
        {"gpu_bind": "map_gpu:0,1,2,3", "cpu_bind": "mask_cpu:0xff,0xff00"},
        {"env": {"NCCL_PROXY_DUMP_SIGNAL": "11"}},
        {"export": "ALL,A=b c"},
        {"env": {"GLOO_SOCKET_IFNAME": "eth0"}},
    ],
)
def test_a_value_as_slurm_takes_it_is_let_through(values):
    check_cluster(ClusterSpec(**values))
