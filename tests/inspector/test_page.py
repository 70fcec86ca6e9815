"""Every view as a person sees it: a real Chromium on a real proxy over recorded sessions."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import AsyncOpenAI

from graphstore.store.archive import open_reader
from graphstore.store.marks import set_mark
from graphstore.store.report import exchange_tokens, latest_selection
from proxy.ledger import Price
from tests.fakes.scripted_upstream import Fault, ScriptedUpstream
from tests.inspector.conftest import Recorded, Visit, visiting
from tests.inspector.world import HEADERS, HOSTILE, MODEL
from tests.proxy.dialogue import LUNCH_S, SYSTEM, TOOLS, turn, user
from tests.proxy.test_supervisor import until

if TYPE_CHECKING:
    from playwright.async_api import Browser, Route

pytestmark = [pytest.mark.browser, pytest.mark.asyncio(loop_scope="session")]

CODING = "entire-3fb30de16616"
VIEWS = (
    "sessions",
    "session/{}",
    "session/{}/turn/3",
    "session/{}/block/13",
    "session/{}/what-if",
    "savings",
    "health",
)
DEADLINE_MS = 20_000


async def test_the_list_shows_each_session_with_what_was_sent(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    name = recorded.names[CODING]
    with recorded.opened(CODING) as (reader, session):
        last = reader.last_exchange(session.id)
        assert last is not None
        tokens = exchange_tokens(reader, [last])[last.id]
    assert tokens.sent < tokens.full
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.to("sessions")
        row = await visit.text(f'tr[data-row="{name}"]')
        for wanted in (session.title, "opencode", MODEL, f"{tokens.sent:,} of {tokens.full:,}", "cold", "normal"):
            assert wanted in row, wanted
        assert "pass-through" in await visit.text(f'tr[data-row="{recorded.names[HOSTILE]}"]')
        assert "A title?" not in await visit.text(), "side requests are asked for"
        await visit.page.check("#side")
        await visit.page.wait_for_selector("text=A title?")


async def test_search_finds_what_was_said_and_opens_the_block(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.to("sessions")
        await visit.page.fill("#search", "testhasuncommittedchanges")
        await visit.page.click(".hits li a")
        await visit.page.wait_for_selector(".message")
        assert "TestHasUncommittedChanges" in await visit.text()


async def test_the_map_shows_turns_boundaries_and_arcs_and_walks_by_keyboard(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    name = recorded.names[CODING]
    with recorded.opened(CODING) as (reader, session):
        edge = reader.load_edges(session.id)[0]
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.to(f"session/{name}")
        canvas = visit.page.locator(".map canvas")
        assert (await canvas.get_attribute("aria-label") or "").startswith(f"Session map: {session.turns} turns")
        await visit.page.wait_for_selector(".map canvas[data-painted]")
        assert int(await canvas.get_attribute("data-painted") or 0) > 50
        assert await painted_colours(visit) > 8, "attention has shades"
        await canvas.focus()
        await visit.page.keyboard.press("ArrowDown")
        for _ in range(edge.dependent):
            await visit.page.keyboard.press("ArrowRight")
        told = await visit.text(".told")
        assert f"Block {edge.dependent} in turn {session.turns}" in told and f"uses {edge.support}" in told
        await visit.page.wait_for_selector(".map canvas[data-arcs]:not([data-arcs='0'])")
        await visit.page.keyboard.press("Enter")
        await visit.page.wait_for_selector(f"h1:text-is('Block {edge.dependent}')")


async def painted_colours(visit: Visit) -> int:
    """Number of different colours on the map."""
    count: int = await visit.page.evaluate(
        """() => { const canvas = document.querySelector('.map canvas'); const seen = new Set();
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        for (let i = 0; i < data.length; i += 4) seen.add(data[i] * 65536 + data[i + 1] * 256 + data[i + 2]);
        return seen.size; }"""
    )
    return count


async def test_the_map_zooms_and_tells_what_the_pointer_is_on(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.to(f"session/{recorded.names[CODING]}")
        box = await visit.page.locator(".map").bounding_box()
        assert box is not None
        await visit.page.mouse.move(box["x"] + 120, box["y"] + 15)
        await visit.page.wait_for_selector(".told:has-text('in turn 1')")
        before = await visit.page.evaluate("document.querySelector('.map').scrollWidth")
        await visit.page.click("button[aria-label='Zoom in']")
        assert await visit.page.evaluate("document.querySelector('.map').scrollWidth") > 1.4 * before
        await visit.page.click("button[aria-label='Zoom to fit']")
        assert await visit.page.evaluate("document.querySelector('.map').scrollWidth") == before


async def test_a_turn_shows_its_facts_its_budget_and_every_block_with_its_reason(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    name = recorded.names[CODING]
    with recorded.opened(CODING) as (reader, session):
        made = latest_selection(reader, session.id)
        assert made is not None
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.to(f"session/{name}/turn/{made.turn}")
        text = await visit.text()
        for wanted in (
            made.reason,
            f"budget {made.budget:,}",
            f"protected {made.protected_cost:,}",
            "step",
            "prefix kept",
        ):
            assert wanted in text, wanted
        rows = visit.page.locator("table:has(caption:text-is('Blocks of the selection')) tbody tr")
        assert await rows.count() == len(made.verdicts)
        left_out = next(v for v in made.verdicts if not v.kept)
        row = await visit.text(f'tr[data-row="{left_out.ordinal}"]')
        assert "left out" in row and left_out.detail in row
        await visit.page.click(".chip:has-text('dropped')")
        assert 0 < await rows.count() < len(made.verdicts)
        await visit.page.click("text=turn before")
        await visit.page.wait_for_selector(f"h1:text-is('Turn {made.turn - 1} of {name}')")


async def test_a_block_is_there_verbatim_and_can_be_downloaded(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    name = recorded.names[CODING]
    with recorded.opened(CODING) as (reader, session):
        block = next(block for block, _ in reader.load_blocks(session.id) if block.ordinal == 13)
        raw = reader.node_contents(block.node_ids)
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.to(f"session/{name}/block/13")
        shown = await visit.page.locator(".message > pre").all_text_contents()
        assert json.loads(raw[1])["content"] == shown[1]
        await visit.page.click("article:last-child summary")
        await visit.page.wait_for_selector("details[open] pre:not(:empty)")
        assert (await visit.page.locator("details[open] pre").text_content() or "").encode() == raw[-1]
        assert await visit.page.locator(".chart rect").count() == 6, "attention in each of six turns"
        async with visit.page.expect_download() as started:
            await visit.page.click("text=Download JSON")
        download = await started.value
        saved = tmp_path / "block.json"
        await download.save_as(saved)
        assert saved.read_bytes() == b"[" + b",\n".join(raw) + b"]\n"


async def test_what_if_selects_by_the_words_of_the_request(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.to(f"session/{recorded.names[CODING]}/what-if")
        shown = []
        for query in ("TestHasUncommittedChanges", "batch-supabase-webhook-operations"):
            await visit.page.fill("#query", query)
            async with visit.page.expect_response("**/what-if"):
                await visit.page.click("button[type=submit]")
            await visit.page.wait_for_selector(".chips button")
            shown.append(await visit.text("section.card"))
        assert "Would send" in shown[0] and "Against the selection of turn 5" in shown[0]
        assert shown[0] != shown[1]


async def test_savings_and_health_say_what_the_archive_holds(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    prices = {"gpt-*": Price(input=1.0, cached=0.1, output=5.0)}
    async with visiting(browser, recorded, tmp_path, changes={"prices": prices}) as visit:
        await visit.to("savings")
        text = await visit.text()
        assert "Input tokens saved" in text and "Money saved" in text and "1 made again after a refusal" in text
        with open_reader(recorded.path) as reader:
            rows = [row for session in reader.list_sessions() for row in reader.session_exchanges(session.id)]
        given, cached = sum(row.input_tokens or 0 for row in rows), sum(row.cached_tokens or 0 for row in rows)
        assert f"{cached:,} of {given:,} input tokens" in text
        await visit.page.click("nav >> text=Health")
        await visit.page.wait_for_selector("h1:text-is('Health')")
        text = await visit.text()
        assert str(tmp_path / "recap.db") in text and "the client's own request was sent instead" in text


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_no_view_has_a_serious_finding_of_axe(
    browser: "Browser", recorded: Recorded, tmp_path: Path, scheme: str
) -> None:
    from axe_playwright_python.async_playwright import Axe

    async with visiting(browser, recorded, tmp_path, color_scheme=scheme, bypass_csp=True) as visit:
        for view in VIEWS:
            await visit.to(view.format(recorded.names[CODING]))
            if "what-if" in view:
                await visit.page.click("button[type=submit]")
                await visit.page.wait_for_selector(".chips")
            found = await Axe().run(visit.page)
            serious = [v for v in found.response["violations"] if v["impact"] in ("serious", "critical")]
            assert not serious, (view, [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in serious])


async def test_on_a_phone_nothing_runs_out_of_the_screen(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True}
    async with visiting(browser, recorded, tmp_path, **phone) as visit:  # type: ignore[arg-type]
        for view in VIEWS:
            await visit.to(view.format(recorded.names[CODING]))
            assert await visit.page.evaluate("document.documentElement.scrollWidth") <= 390, view
        await visit.page.set_viewport_size({"width": 320, "height": 640})
        await visit.to("sessions")
        await visit.page.fill("#search", "test")
        await visit.page.wait_for_selector(".hits li")
        assert await visit.page.evaluate("document.documentElement.scrollWidth") <= 320, "hits of a search"


async def test_what_a_client_sent_is_text_in_every_view(browser: "Browser", recorded: Recorded, tmp_path: Path) -> None:
    """Title, model, session id, tool name, arguments, results, answers and queries are markup here."""
    name = recorded.names[HOSTILE]
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.page.add_init_script("window.alert = () => { window.hurt = true }")
        for view in (*VIEWS, "session/{}/block/1", "session/{}/turn/2"):
            view = view.replace("block/13", "block/0").replace("turn/3", "turn/1").format(name)
            await visit.to(view)
            if "what-if" in view:
                await visit.page.fill("#query", HOSTILE)
                await visit.page.click("button[type=submit]")
                await visit.page.wait_for_selector(".chips, .quiet")
            elif view == "sessions":
                await visit.page.fill("#search", "<img src=x")
                await visit.page.wait_for_selector(".hits q")
            elif view != "health":
                assert HOSTILE[:60] in (await visit.page.text_content("main") or ""), view
            inside = await visit.page.evaluate("document.querySelectorAll('main img, main script, main b').length")
            assert inside == 0 and not await visit.page.evaluate("window.hurt"), view
        await visit.to(f"session/{name}/block/1")
        assert HOSTILE in (await visit.page.locator(".message > pre").all_text_contents())[1]
        for odd in ("session/%3Cimg%20src=x%3E", "nowhere/<b>", f"session/{name}/turn/9"):
            await visit.page.goto(f"{visit.proxy.url}/recap/#/{odd}")
            await visit.page.wait_for_selector("h1:text-is('Not to be shown')")
            assert await visit.page.evaluate("document.querySelectorAll('main img, main b').length") == 0
        visit.console = [line for line in visit.console if "404" not in line]  # Chromium's own word on those two


async def test_a_request_is_seen_while_it_streams_and_when_it_ended(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    async with ScriptedUpstream() as upstream:
        async with visiting(browser, recorded, tmp_path, upstream=upstream.base_url) as visit:
            await visit.to("sessions")
            await visit.page.wait_for_selector("#live:text-is('live')")
            upstream.inject(Fault(stall_after=200))
            client = AsyncOpenAI(
                base_url=f"{visit.proxy.url}/v1", api_key="k", default_headers={"x-session-id": "live"}
            )
            stream = await client.chat.completions.create(
                model="gpt-live", messages=[{"role": "user", "content": "Watch me [[= done]]"}], stream=True,
                stream_options={"include_usage": True},
            )  # fmt: skip
            row = visit.page.locator("tr:has-text('Watch me')")
            await row.wait_for(timeout=DEADLINE_MS)
            assert "running" in await row.inner_text()
            await row.locator("a").click()
            await visit.page.wait_for_selector("tbody .running", timeout=DEADLINE_MS)
            upstream.release()
            async for _ in stream:
                pass
            await visit.page.wait_for_selector("tbody:not(:has(.running))", timeout=DEADLINE_MS)
            used = upstream.conversations[-1]
            assert used is not None
            with open_reader(tmp_path / "recap.db") as reader:
                last = reader.last_exchange(reader.list_sessions()[0].id)
            assert last is not None and last.input_tokens
            assert f"{last.input_tokens:,}" in await visit.text("tbody")
            await client.close()


async def test_a_pin_is_obeyed_at_the_next_cold_boundary(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    """Turns are sent to the proxy; a block that was left out is pinned on the page; after lunch it is sent."""
    history = [*turn("Where is alpha?", "alpha"), *turn("And beta?", "beta"), *turn("And gamma?", "gamma")]
    async with ScriptedUpstream() as upstream:
        async with visiting(browser, recorded, tmp_path, upstream=upstream.base_url, changes={"eps": 0.0}) as visit:
            async with httpx.AsyncClient(base_url=visit.proxy.url, timeout=30) as client:

                async def send(messages: list[dict[str, Any]], *, after_s: float) -> str:
                    visit.clock.advance(after_s)
                    body = {"model": "gpt-test", "messages": [SYSTEM, *messages], "tools": TOOLS}
                    headers = HEADERS | {"x-session-affinity": "pins", "authorization": "Bearer k"}
                    answer = await client.post("/v1/chat/completions", json=body, headers=headers)
                    assert answer.status_code == 200
                    return json.dumps(upstream.conversations[-1].json)

                for end in (1, 3, 5, 7, 9, 11):
                    await send(history[:end], after_s=5)
                sent = await send([*history, user("Now fix gamma [[= ok]]")], after_s=LUNCH_S)
                assert "unique_alpha" not in sent
                history += [user("Now fix gamma [[= ok]]"), {"role": "assistant", "content": "ok"}]
                await visit.to("sessions")
                await visit.page.click("text=Where is alpha?")
                await visit.page.wait_for_selector(".map canvas")
                await visit.page.goto(visit.page.url + "/block/1")
                await visit.page.wait_for_selector("h1:text-is('Block 1')")
                await visit.page.click("button:text-is('Pin')")
                await visit.page.wait_for_selector("text=Pinned by hand")
                assert "characters that a selection may keep" in await visit.text("main .notice")
                assert await visit.page.get_attribute("button:text-is('Pin')", "aria-pressed") == "true"
                assert "unique_alpha" not in await send([*history, user("warm [[= ok]]")], after_s=5), "cache is warm"
                history += [user("warm [[= ok]]"), {"role": "assistant", "content": "ok"}]
                assert "unique_alpha" in await send([*history, user("Cold [[= ok]]")], after_s=LUNCH_S)
                await visit.page.goto(visit.page.url.replace("/block/1", "/turn/6"))
                await visit.page.wait_for_selector("text=protected: pinned by hand", timeout=DEADLINE_MS)
                assert "your pins and protected blocks exceed the budget" in await visit.text()
                assert await visit.page.locator(".bar .limit").count() == 1 and "exceeded by" in await visit.text()
                assert "saved by the provider's count" in (await visit.text()).lower()
                await visit.page.goto(visit.page.url.replace("/turn/6", "/block/0"))
                await visit.page.wait_for_selector("h1:text-is('Block 0')")
                assert await visit.page.is_disabled("button:text-is('Mute')"), "a user's words are protected"


async def test_the_page_asks_for_the_key_and_keeps_it(browser: "Browser", recorded: Recorded, tmp_path: Path) -> None:
    async with visiting(browser, recorded, tmp_path, changes={"proxy_key": "sesame"}) as visit:
        await visit.page.goto(f"{visit.proxy.url}/recap/")
        for given in ("wrong", "sesame"):
            await visit.page.wait_for_selector("dialog[open]")
            await visit.page.fill("#key", given)
            await visit.page.click("dialog button")
            if given == "wrong":
                await visit.page.wait_for_selector("#key-wrong:visible")
        await visit.page.wait_for_selector("h1:text-is('Sessions')")
        await visit.page.wait_for_selector("#live:text-is('live')")
        await visit.page.reload()
        await visit.page.wait_for_selector("h1:text-is('Sessions')")
        visit.console = [line for line in visit.console if "401" not in line]  # Chromium's own word on the refusals


async def test_a_key_that_no_header_can_hold_is_refused_and_the_dialog_can_be_left(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    async with visiting(browser, recorded, tmp_path, changes={"proxy_key": "sesame"}) as visit:
        await visit.page.goto(f"{visit.proxy.url}/recap/")
        await visit.page.wait_for_selector("dialog[open]")
        await visit.page.fill("#key", "钥匙")
        await visit.page.click("dialog button")
        assert await visit.page.is_visible("dialog[open]")
        await visit.page.keyboard.press("Escape")
        await visit.page.wait_for_selector("[role=alert]:text('wants its key')")
        assert await visit.page.evaluate("sessionStorage.length") == 0
        await visit.page.reload()
        await visit.page.fill("dialog[open] #key", "sesame")
        await visit.page.click("dialog button")
        await visit.page.wait_for_selector("h1:text-is('Sessions')")
        visit.console = [line for line in visit.console if "401" not in line]


HIDE = """hidden => {
    Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
    document.dispatchEvent(new Event("visibilitychange"));
}"""


async def test_a_page_that_nobody_sees_holds_no_connection(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    """A browser opens six to one server, for all tabs together."""
    async with visiting(browser, recorded, tmp_path) as visit:
        listeners = visit.proxy.app.state.inspector.feed._listeners
        await visit.to("sessions")
        await visit.page.wait_for_selector("#live:text-is('live')")
        assert len(listeners) == 1
        for hidden in (True, False):
            await visit.page.evaluate(HIDE, hidden)
            await until(lambda wanted=not hidden: bool(listeners) is wanted)  # type: ignore[misc]


async def test_a_view_that_could_not_be_opened_is_opened_when_it_can_be(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.page.route("**/api/savings", lambda route: route.fulfill(status=503, body="{}"))
        await visit.page.goto(f"{visit.proxy.url}/recap/#/savings")
        await visit.page.wait_for_selector("[role=alert]:text('503')")
        await visit.page.unroute("**/api/savings")
        visit.proxy.app.state.inspector.feed.close()  # it comes back, as after a restart
        visit.proxy.app.state.inspector.feed._closed = False
        await visit.page.wait_for_selector("h1:text-is('Savings')", timeout=DEADLINE_MS)
        visit.console = [line for line in visit.console if "503" not in line]


async def test_a_proxy_that_went_away_is_said_and_found_again(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.to("sessions")
        await visit.page.wait_for_selector("#live:text-is('live')")
        visit.proxy.app.state.inspector.feed.close()
        await visit.page.wait_for_selector("#live:text-is('proxy not reached')", timeout=DEADLINE_MS)
        visit.proxy.app.state.inspector.feed._closed = False
        await visit.page.wait_for_selector("#live:text-is('live')", timeout=DEADLINE_MS)


async def test_an_archive_without_sessions_says_how_to_begin(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    from tests.archives import lay_out_archive

    empty = tmp_path / "empty.db"
    lay_out_archive(empty)
    async with visiting(browser, Recorded(empty, recorded.now, {}), tmp_path) as visit:
        await visit.to("sessions")
        assert f"OPENAI_BASE_URL={visit.proxy.url}/v1" in await visit.text()
        await visit.page.click("nav >> text=Savings")
        await visit.page.wait_for_selector("text=No exchange yet.")


async def test_a_proxy_on_an_archive_in_use_says_on_every_page_that_it_records_nothing(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    async with (
        visiting(browser, recorded, tmp_path) as first,
        visiting(browser, recorded, tmp_path, in_use=True) as second,
    ):
        for view in ("sessions", "savings", f"session/{recorded.names[CODING]}"):
            await second.to(view)
            assert "is in use by another recap process" in await second.text("#problem")
        await first.to("sessions")
        assert not await first.page.is_visible("#problem")


async def test_a_block_thinner_than_a_pixel_does_not_swallow_its_neighbour(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    """It took over the colour, the outline and what was sent of a wide block beside it."""
    blocks = {
        "ordinal": [0, 1, 2], "kind": ["user", "tools", "tools"], "label": ["", "", ""], "tokens": [1, 50_000, 50_000],
        "outline": ["user", None, None], "mark": [None, None, None],
    }  # fmt: skip
    row = {"turn": 1, "reason": None, "blocks": [[0, 2]], "left_out": [[1, 1]], "sizes": [[], []], "density": [[], []]}
    async with visiting(browser, recorded, tmp_path, bypass_csp=True) as visit:
        await visit.to("health")
        left, right = await visit.page.evaluate(
            """async (answer) => {
                const { MapData, SessionMap } = await import(`${location.origin}/recap/static/map.js`);
                const map = new SessionMap({ told() {}, opened() {} });
                document.querySelector('main').append(map.element);
                map.show(new MapData(answer));
                await new Promise((resolve) => setTimeout(resolve, 200));
                const canvas = map.canvas, pen = canvas.getContext('2d');
                const line = pen.getImageData(0, 6 + 18 + 3, canvas.width, 1).data;
                const strip = (share) => [...line.slice(4 * Math.round(64 + share * (canvas.width - 66))).slice(0, 3)];
                return [strip(0.25), strip(0.75)];
            }""",
            {"blocks": blocks, "rows": [row]},
        )
        assert right == [0x15, 0x80, 0x3D] and left == [0xC9, 0xCE, 0xD8], "sent on the right, left out before"


async def test_expansion_beyond_the_budget_is_no_overrun(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    """It has room of its own; only what is protected can exceed the budget."""

    async def expanded(route: "Route") -> None:
        reply = await route.fetch()
        body = await reply.json()
        selection = body["selection"]
        selection["spent"]["expanded"] += selection["budget"]
        selection["cost"] += selection["budget"]
        await route.fulfill(response=reply, json=body)

    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.page.route("**/turns/5", expanded)
        await visit.to(f"session/{recorded.names[CODING]}/turn/5")
        text = await visit.text()
        assert "budget 5,845" in text and "expanded 5,845" in text and "exceeded" not in text


async def test_a_turn_says_what_was_asked_and_keeps_what_a_person_typed_when_something_happens(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    name = recorded.names[CODING]
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.to(f"session/{name}/turn/5")
        with recorded.opened(CODING) as (reader, session):
            first = next(row for row in reader.session_exchanges(session.id) if row.turn == 5)
            (raw,) = reader.node_contents([first.head_node_id or 0])
        said = json.loads(raw)["content"]
        assert said[:60].split("\n")[0] in await visit.text(".asked")
        await visit.page.wait_for_selector("#live:text-is('live')")
        await visit.page.fill(".filter input", "Bash")
        shown = await visit.page.locator("table:has(caption:text-is('Blocks of the selection')) tbody tr").count()
        set_mark(tmp_path / "recap.db", session.id, 1, "pin", clock=visit.clock)
        async with visit.page.expect_response("**/turns/5", timeout=DEADLINE_MS):
            pass
        assert await visit.page.input_value(".filter input") == "Bash" and shown > 0
        rows = visit.page.locator("table:has(caption:text-is('Blocks of the selection')) tbody tr")
        assert await rows.count() == shown


async def drawn_anew(visit: Visit, database: Path, session_id: int, part: str = ".view h1") -> None:
    """Something happens in a session; back when the view shows it."""
    await visit.page.wait_for_selector("#live:text-is('live')")
    await visit.page.evaluate("part => { document.querySelector(part).isOld = true; }", part)
    with closing(sqlite3.connect(database)) as db:
        newest = "(SELECT max(id) FROM exchanges WHERE session_id = ?)"
        db.execute(f"UPDATE exchanges SET output_tokens = output_tokens + 1 WHERE id = {newest}", (session_id,))
        db.execute("UPDATE sessions SET last_active_at = last_active_at + 1 WHERE id = ?", (session_id,))
        db.commit()
    await visit.page.wait_for_function("part => !document.querySelector(part).isOld", arg=part, timeout=DEADLINE_MS)


async def test_whatever_has_the_focus_keeps_it_when_something_happens(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    """Who reads by keyboard or by ear is not thrown back to the top by every request of an agent."""
    with recorded.opened(CODING) as (_, session):
        pass
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.to(f"session/{session.name}")
        for part in ("h1", ".crumbs a", "a.button", ".table", "tbody tr:nth-child(3) a"):
            await visit.page.focus(f".view {part}")
            before = await visit.page.evaluate("document.activeElement.outerHTML.slice(0, 40)")
            await drawn_anew(visit, tmp_path / "recap.db", session.id)
            assert await visit.page.evaluate("document.activeElement.outerHTML.slice(0, 40)") == before, part
            assert before.startswith("<"), part


async def test_a_long_list_stays_as_long_as_it_was_made(browser: "Browser", recorded: Recorded, tmp_path: Path) -> None:
    with recorded.opened(CODING) as (_, session):
        pass
    async with visiting(browser, recorded, tmp_path) as visit:
        with closing(sqlite3.connect(tmp_path / "recap.db")) as db:
            columns = [row[1] for row in db.execute("PRAGMA table_info(sessions)")]
            own = {"id": "id + 1000 + n", "name": "'copy' || n", "client_id": "'copy' || n"}
            taken = ", ".join(own.get(column, column) for column in columns)
            numbers = "WITH RECURSIVE numbers(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM numbers WHERE n < 220)"
            db.execute(
                f"INSERT INTO sessions ({', '.join(columns)}) {numbers} "
                f"SELECT {taken} FROM sessions, numbers WHERE id = ?",
                (session.id,),
            )
            db.commit()
        await visit.to("sessions")
        rows = visit.page.locator("tbody tr")
        assert await rows.count() == 100
        await visit.page.click("button.more")
        assert await rows.count() == 200
        await drawn_anew(visit, tmp_path / "recap.db", session.id, "tbody")
        assert await rows.count() == 200
        await visit.page.click("button.more")
        assert await rows.count() > 200
        assert await visit.page.evaluate("document.activeElement.className") == "table", "the button is gone"


async def test_what_was_opened_stays_open_while_the_turn_runs(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    with recorded.opened(CODING) as (reader, session):
        last = reader.session_exchanges(session.id)[-1].turn
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.to(f"session/{session.name}/turn/{last}")
        await visit.page.click("summary:has-text('What the provider reported')")
        await drawn_anew(visit, tmp_path / "recap.db", session.id, "summary")
        assert await visit.page.evaluate("document.querySelector('details').open")


async def test_the_map_shows_a_mark_made_elsewhere_and_is_asked_for_again_when_it_failed(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    with recorded.opened(CODING) as (_, session):
        pass
    async with visiting(browser, recorded, tmp_path) as visit:
        failures = ["first"]

        async def answer(route: "Route") -> None:
            if failures:
                failures.clear()
                await route.fulfill(status=200, body="{ this is no map")
            else:
                await route.continue_()

        await visit.page.route("**/map", answer)
        await visit.to(f"session/{session.name}")
        trouble = ".notice:has-text('Not all of the map')"
        await visit.page.wait_for_selector(trouble)
        assert await visit.page.locator("tbody tr").count() > 3, "the turns are there all the same"
        await visit.page.wait_for_selector(
            ".notice:has-text('Not all of the map')", state="hidden", timeout=DEADLINE_MS
        )
        await visit.page.locator(".map canvas").focus()
        for _ in range(4):
            await visit.page.keyboard.press("ArrowRight")
        ordinal = int((await visit.text(".told")).split()[1])
        set_mark(tmp_path / "recap.db", session.id, ordinal, "pin", clock=visit.clock)
        await visit.page.wait_for_selector(".told:has-text('pinned')", timeout=DEADLINE_MS)


async def test_a_refused_selection_is_not_said_to_have_been_sent(
    browser: "Browser", recorded: Recorded, tmp_path: Path
) -> None:
    async with visiting(browser, recorded, tmp_path) as visit:
        await visit.to(f"session/{recorded.names[HOSTILE]}/turn/2")
        text = await visit.text()
        assert "The upstream refused the request" in text and "Would send" in text and "would be left out" in text
