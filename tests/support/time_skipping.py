"""Temporal's test server that skips time, in Java. Run as a program, this file fetches it and says where it is."""

from __future__ import annotations

import functools
from pathlib import Path

import maven
from caches import cached, missing

VERSION = "1.38.0"

# The logger that says nothing spares every start three lines on that there is none.
POM = f"""\
<project>
  <modelVersion>4.0.0</modelVersion>
  <groupId>redlease</groupId>
  <artifactId>time-skipping</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>io.temporal</groupId>
      <artifactId>temporal-test-server</artifactId>
      <version>{VERSION}</version>
    </dependency>
    <dependency>
      <groupId>org.slf4j</groupId>
      <artifactId>slf4j-nop</artifactId>
      <version>1.7.36</version>
    </dependency>
  </dependencies>
</project>
"""

# A JVM that compiles less starts sooner.
SCRIPT = """\
#!/bin/sh
here=$(dirname "$0")
exec java -Xmx512m -XX:TieredStopAtLevel=1 -cp "$here/lib/*" io.temporal.testserver.TestServer "$@"
"""


@functools.cache
def time_skipping_server() -> Path | None:
    """Return a program for `WorkflowEnvironment.start_time_skipping(test_server_existing_path=...)`.

    Its parts are fetched by Maven when they are asked for the first time on this machine. Without Java or Maven it is
    None, with which the SDK fetches a program of its own.
    """
    if missing("java", "mvn"):
        return None
    return cached(f"temporal-test-server-{VERSION}", _fetch) / "temporal-test-server"


def _fetch(directory: Path) -> None:
    """Put the server's jars and a script that runs them into the directory."""
    pom = directory / "pom.xml"
    pom.write_text(POM)
    maven.fetch(
        "the server that skips time",
        *(f"--file={pom}", "dependency:copy-dependencies"),
        *(f"-DoutputDirectory={directory / 'lib'}", "-DincludeScope=runtime"),
    )
    script = directory / "temporal-test-server"
    script.write_text(SCRIPT)
    script.chmod(0o755)


if __name__ == "__main__":
    print(time_skipping_server())  # noqa: T201
