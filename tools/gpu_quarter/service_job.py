"""`python -m tools.gpu_quarter.service_job FOLDER`: posts FOLDER/job.json to a service of its own and waits.

The service is embedded: SQLite and one worker. The job's results and the leaderboard are written beside it.
"""

import json
import sys
from pathlib import Path

from examples.service import embedded_service
from optigpu.client import Client
from optigpu.documents.files import read_json
from optigpu.job.spec import JobSpec
from optigpu.vocabulary import JobState


def main(folder: Path) -> int:
    """0 where the job succeeded."""
    spec = JobSpec.model_validate(read_json(folder / "job.json"))
    with embedded_service(folder / "service.log") as url, Client(url) as client:
        job = client.wait(client.submit(spec).id)
        found = {
            "ended": job.model_dump(mode="json"),
            "report": client.report(job.id),
            "leaderboard": client.leaderboard().model_dump(mode="json"),
        }
        for name, document in found.items():
            (folder / f"{name}.json").write_text(json.dumps(document, indent=2) + "\n")
    print(f"The job ended as {job.state}.")
    return 0 if job.state is JobState.SUCCEEDED else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
