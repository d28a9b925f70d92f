"""What the pages with parts of programs take for granted: their snippets are type-checked after these lines.

The lines are those of one page for all of its snippets. A page that is not here has snippets that run.
"""

WORKFLOW = """
from datetime import timedelta
from temporalio import activity, workflow
from redlease_temporal import all_of, lock, rwlock, semaphore
SOON = timedelta(minutes=1)
@activity.defn
async def update(fence: int) -> None: ...
@activity.defn
async def publish() -> None: ...
"""

# The names on the pages that would make a long story of a short example.
GIVEN = {
    "docs/temporal.md": f"""{WORKFLOW}
from temporalio.testing import WorkflowEnvironment
from redlease_temporal.worker import current_hold, exclusive
class Order:
    vendor: str
class Receipt: ...
class Vendor:
    async def post(self, order: Order, fence: int) -> Receipt: return Receipt()
vendor = Vendor()
gpu = semaphore("gpu", capacity=3)
@activity.defn
async def transfer(fences: list[int]) -> None: ...
""",
    "docs/languages.md": f"""{WORKFLOW}
import asyncio
from temporalio.client import Client
from redlease_temporal.worker import RedleasePlugin
@activity.defn
async def train(fence: int) -> None: ...
""",
    "docs/admission.md": """
from temporalio import workflow
class Order:
    customer: str
class Push:
    branch: str
class Receipt: ...
""",
    "docs/which-backend.md": """
from temporalio.client import Client
from redlease_temporal import outside
from redlease_temporal.worker import RedleasePlugin
async def work(fence: int) -> None: ...
""",
    "docs/sequences.md": """
from datetime import timedelta
from temporalio import activity
from temporalio.client import Client
client: Client
payments: list[str]
payment: str
@activity.defn
async def post(payment: str) -> str: return payment
""",
    "docs/cluster-and-sentinel.md": """
import redis.asyncio
from redis.asyncio.sentinel import Sentinel
from redlease import Redlease
client: Redlease
""",
    "docs/logging.md": "",
    "docs/migrating/temporal-samples.md": f"""{WORKFLOW}
import contextlib
from collections.abc import AsyncIterator
class PoolClient:
    @contextlib.asynccontextmanager
    async def acquire_resource(self, *, max_wait_time: timedelta) -> AsyncIterator[str]: yield ""
pool_client = PoolClient()
@activity.defn
async def train() -> None: ...
""",
}
