"""Runs the image: as `docker run` would, then the pods of the Helm chart with it.

    tests/deploy/build                    # the image, once: minutes
    python -m tests.deploy.image          # as root; two minutes on two idle cores

The root is read-only, the user is not root, and there are no capabilities. Commands, environment,
secrets, configuration and probes of the pods are those of the render; so is the request of
`helm test`, which has to pass through prefill, pull and decode.
"""

import shlex
from typing import Any

from tests.deploy.containers import CONFINED, WORK, Container, prepare
from tests.helm.charts import CHART, Render, documents
from tests.helm.pods import ADDRESSES, serve_and_end, write_files
from tests.support.namespaces import enter, join, wait

NEEDED = ("grep", "hf", "kvlane", "python", "ray", "sh", "sleep")  # by the pods' commands


def as_it_is() -> None:
    """The image's own command, as in the first lines of the Dockerfile."""
    container = Container("kvlane")
    wait("kvlane serves", lambda: "kvlane serves" in container.output, 120, container.ended)
    assert container.run("id", "-u", "-n").strip() == "kvlane"
    for word in NEEDED:
        container.run("sh", "-c", f"command -v {word}")
    refused = container.run("sh", "-c", "! touch /opt/kvlane/x 2>&1")
    assert "Read-only file system" in refused, refused
    asked = ("env", "URL=http://127.0.0.1:8000", "PREFILLS=prefill", "python", "-c")
    print(container.run(*asked, (CHART / "files" / "request.py").read_text()), end="")
    code = container.end(60)
    assert code == 0, f"{code}\n{container.output}"
    print("docker run: a completion, then SIGTERM: 0")


def pod(name: str, spec: dict[str, Any], environment: dict[str, str]) -> Container:
    """A pod of the chart; command and args of Kubernetes stand for ENTRYPOINT and CMD."""
    described, user = spec["containers"][0], spec["securityContext"]["runAsUser"]
    first, *rest = [*described["command"], *described["args"]]
    volumes = (f"--volume={WORK}/hosts:/etc/hosts:ro", f"--volume={WORK}/config:/etc/kvlane:ro")
    given = (f"--env={key}={value}" for key, value in environment.items())
    network = f"--network=ns:/run/netns/{join(name, ADDRESSES[name])}"
    own = (f"--user={user}:{user}", f"--entrypoint={first}", network)
    return Container(name, rest, options=(*CONFINED, *volumes, *own, *given))


def main() -> None:
    enter("tests.deploy.image")
    prepare()
    as_it_is()
    render = Render(documents("default"))
    write_files(render, WORK)
    serve_and_end(render, pod)
    print(f"the pods' own commands, as {shlex.join(CONFINED)}: served and ended")


if __name__ == "__main__":
    main()
