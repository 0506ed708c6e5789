"""A session whose node does not answer while Slurm still thinks that it runs; part of `./test faults`."""

from demo_site import DemoSite, wait_until
from patience import HANG

START = {"image": "base", "nodes": "1", "gpus_per_node": "0", "minutes": "10", "title": "Out of reach"}


def test_a_session_whose_node_does_not_answer_is_out_of_reach_until_it_is_back(demo: DemoSite) -> None:
    """Slurm gives the demo's nodes up within seconds; here it waits longer, as it does on a real site."""

    def refresh_nodes(node_answers: bool) -> None:
        """Wait until Slurm knows the node's state; any new job then makes the broker read nodes, too."""
        listing = ("sinfo", "--noheader", f"--nodes={node}", "--format=%T")
        wait_until(
            f"Slurm says how {node} stands",
            lambda: demo.run("head", *listing).stdout.strip().endswith("*") is not node_answers,
        )
        demo.carme("submit", "--time", "1", "--", "true")

    # Slurm pings every third of it. A busy machine needs some time between the first lost ping and the end.
    with demo.slurm_settings("SlurmdTimeout=240\n"), demo.visitor("user1") as visitor:
        name = visitor.start(START)
        visitor.wait(name, "ready", timeout=HANG)
        node = demo.carme_json("session", "show", name)["node_list"]
        with visitor.kernel(visitor.open(name)) as kernel:
            kernel.run("kept = 42", timeout=HANG)
            container = demo.podman.container(node)
            demo.podman.run("pause", container, timeout=HANG)
            try:
                refresh_nodes(node_answers=False)
                page = visitor.wait(name, "lost", timeout=HANG)
                assert page.label == "Out of reach"
                assert (
                    f"The node of the session ({node}) does not answer; wait: the session comes" in page.text
                )
                listed = demo.carme("session", "list").stdout
                assert "Out of reach" in listed
                running = demo.run(
                    "head", "squeue", "--noheader", f"--name=session-{name}", "--format=%T"
                ).stdout
                assert running.strip() == "RUNNING"
            finally:
                demo.podman.run("unpause", container, timeout=HANG)
            refresh_nodes(node_answers=True)
            visitor.wait(name, "ready", timeout=HANG)
            kernel.connect()
            assert kernel.run("print(kept)", timeout=HANG).output.strip() == "42"
        visitor.stop(name)
        visitor.wait(name, "ended", timeout=HANG)
