"""What the Prefect server does by itself about runs that died or that nobody starts: ``python -m flows.automations``.

``make up`` sees to them; for a server elsewhere call it once with ``PREFECT_API_URL`` set. What the server has stays as
it is, also when somebody edited it or switched it off.

An open-source server has no detection of dead runs of its own, and says *Late* of a run that does not start without
saying why. To be told elsewhere than in the UI, make a notification block there (Slack, e-mail, …) and name it:
``python -m flows.automations slack-webhook/NAME``.
"""

import sys
from datetime import timedelta
from uuid import UUID

from prefect.automations import (
    AutomationCore,
    ChangeFlowRunState,
    EventTrigger,
    Posture,
    ResourceSpecification,
    SendNotification,
)
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.exceptions import ObjectNotFound

from pa_core.errors import ConfigError, UserError

CRASHED = "Runs without a heartbeat have crashed"
UNSERVED = "Late runs say that nothing starts them"

SILENCE_S = 180
"""A run counts as dead after six heartbeats that did not come: a minute without server, and its start, are no death."""
LATE_S = 180
"""Seconds after *Late* until a run says that nothing starts it."""


def silent_after(event: str, seconds: float) -> EventTrigger:
    """Fires for a flow run of which nothing is heard for ``seconds`` after ``event``."""
    return EventTrigger(
        after={event},
        expect={"prefect.flow-run.*"},
        posture=Posture.Proactive,
        threshold=1,
        within=timedelta(seconds=seconds),
        match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
        for_each={"prefect.resource.id"},
    )


def wanted(notify: UUID | None = None) -> list[AutomationCore]:
    """The automations, with a notification as well when a block for it is given."""
    crashed = ChangeFlowRunState(
        state=StateType.CRASHED,
        name="Crashed",
        message=f"no heartbeat for {SILENCE_S} s: its process, or its machine, is gone",
    )
    unserved = ChangeFlowRunState(
        state=StateType.SCHEDULED,
        name="Unserved",
        message="its time has come and nothing starts it: is `make up`, or a worker of its pool, running?",
    )
    told = [] if notify is None else [SendNotification(block_document_id=notify, subject=_SUBJECT, body=_BODY)]
    return [
        AutomationCore(
            name=CRASHED,
            description="A host that dies cannot say so. Its MLflow run is ended by flows.reconcile.",
            trigger=silent_after("prefect.flow-run.heartbeat", SILENCE_S),
            actions=[crashed, *told],
        ),
        AutomationCore(
            name=UNSERVED,
            description="The run stays scheduled, and starts when something serves it again.",
            trigger=silent_after("prefect.flow-run.Late", LATE_S),
            actions=[unserved, *told],
        ),
    ]


_SUBJECT = "{{ automation.name }}: {{ flow_run.name }}"
_BODY = "{{ flow_run.name }} of {{ deployment.name }}: {{ flow_run.state.name }}. {{ flow_run|ui_url }}"


def ensure(client: SyncPrefectClient, notify: UUID | None = None) -> None:
    """Make those that the server does not have. With ``notify``, those it has are made anew to use it, on or off."""
    for automation in wanted(notify):
        known = client.read_automations_by_name(automation.name)
        if not known:
            client.create_automation(automation)
        elif notify is not None:
            client.update_automation(known[0].id, automation.model_copy(update={"enabled": known[0].enabled}))


def notification_block(client: SyncPrefectClient, slug: str) -> UUID:
    """Id of the block ``TYPE/NAME``. Raises :class:`ConfigError` when the server has no such block."""
    kind, _, name = slug.partition("/")
    try:
        return client.read_block_document_by_name(name=name, block_type_slug=kind).id
    except ObjectNotFound:
        raise ConfigError(
            f"notification block {slug!r}: the server has none; make one in the Prefect UI under Blocks and name it as "
            "TYPE/NAME, e.g. slack-webhook/team"
        ) from None


def main(arguments: list[str]) -> int:
    """Exit codes: 0 they are there, 2 bad input."""
    if len(arguments) > 1:
        print("usage: python -m flows.automations [NOTIFICATION_BLOCK]", file=sys.stderr)
        return 2
    with get_client(sync_client=True) as client:
        try:
            ensure(client, notification_block(client, arguments[0]) if arguments else None)
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            return error.exit_code
        print(f"{client.api_url}: " + "; ".join(one.name for one in wanted()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
