"""The dashboard as people use it, in a real browser against real processes."""

import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, Page, Route, expect

from tests.harness.browser import DESKTOP, PHONE, PageErrors
from tests.harness.runs import until
from tests.harness.service import Accrue, running

pytestmark = pytest.mark.thorough

SCREENSHOTS = os.environ.get("ACCRUE_SCREENSHOTS")
"""A folder for pictures of every page: `make test-browser` sets it."""

MINUTES = 60_000
ROOT = "/gradient-accumulation"


@pytest.fixture(scope="module")
def trained(service: Accrue, data: Path) -> list[str]:
    """Two finished jobs with batches of different size."""
    file_id = service.upload(data.read_bytes())
    jobs = [
        service.submit(
            dataset_config={"file_id": file_id, "max_length": 24, "validation_split": 0.1},
            training_config={"epochs": 3, "learning_rate": 1e-3},
            target_effective_batch_size=batch,
            noise_scale_every=2,
        )
        for batch in (8, 32)
    ]
    return [service.ended(job_id)["id"] for job_id in jobs]


def prediction(page: Page) -> Locator:
    return page.get_by_role("region", name="Prediction")


def plan(page: Page, **fields: str) -> None:
    for label, value in fields.items():
        page.get_by_label(label.replace("_", " "), exact=True).fill(value)


def test_from_a_plan_to_a_model(
    page: Page, service: Accrue, data: Path, noticed: PageErrors, trained: list[str]
) -> None:
    page.goto("./")
    page.get_by_label("Upload JSON lines").set_input_files(data)
    expect(page.get_by_text("sums.jsonl is uploaded")).to_be_visible()
    plan(
        page,
        Epochs="30",
        Sequence_length="24",
        Learning_rate="1e-3",
        Effective_batch="16",
        Validation_split="0.1",
    )
    expect(prediction(page).get_by_text("It fits")).to_be_visible()
    page.get_by_role("button", name="Dry run").click()
    expect(page.get_by_text("This would run: 360 steps of 16 samples")).to_be_visible()

    page.get_by_role("button", name="Start").click()
    page.wait_for_url(re.compile("#/job/ftjob-"))
    job_id = page.url.rpartition("/")[2]
    expect(page.get_by_text(re.compile(r"Step [1-9]\d* of 360"))).to_be_visible(timeout=2 * MINUTES)
    expect(page.get_by_label("Events, newest first")).to_contain_text("Job submitted")

    page.reload()
    expect(page.get_by_text(re.compile(r"Step [1-9]\d* of 360"))).to_be_visible()
    expect(page.get_by_label("Events, newest first")).to_contain_text("Job submitted")

    noticed.service_is_down = True
    restart(
        service, lambda: expect(page.get_by_text("The service does not answer")).to_be_visible(timeout=20_000)
    )
    expect(page.get_by_text("The service does not answer")).to_be_hidden(timeout=20_000)
    noticed.service_is_down = False

    expect(page.get_by_text("Step 360 of 360")).to_be_visible(timeout=4 * MINUTES)
    expect(page.get_by_label("Events, newest first").get_by_text("Training succeeded.")).to_have_count(1)
    expect(page.get_by_label("Events, newest first").get_by_text("Job submitted")).to_have_count(1)
    expect(page.get_by_label("Outcome")).to_contain_text("relative difference")  # the certificate
    expect(page.get_by_role("table")).to_contain_text("=")  # held-out sums, as completed
    expect(page.locator("figure .main-svg").first).to_be_visible()

    with page.expect_download() as downloading:
        page.get_by_role("button", name="Download the model").click()
    with tarfile.open(downloading.value.path()) as tar:
        assert any(name.endswith("model.safetensors") for name in tar.getnames())

    page.get_by_role("link", name="Jobs", exact=True).click()
    for each in (job_id, trained[0]):
        page.get_by_label(f"Compare {each}").check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("table")).to_contain_text("batch 16")
    expect(page.get_by_role("table")).to_contain_text("batch 8")
    expect(page.get_by_label("Losses").locator(".main-svg").first).to_be_visible()


def test_several_learning_rates_and_batches_are_a_sweep(
    page: Page, service: Accrue, data: Path, noticed: PageErrors
) -> None:
    page.goto("./")
    page.get_by_label("Upload JSON lines").set_input_files(data)
    expect(page.get_by_text("sums.jsonl is uploaded")).to_be_visible()
    plan(
        page,
        Epochs="1",
        Sequence_length="24",
        Learning_rate="1e-5, 1e-3, x",
        Effective_batch="8, 16",
        Validation_split="0.1",
    )
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text("Numbers above zero, such as 5e-5, separated by commas.")).to_be_visible()
    plan(page, Learning_rate="1e-5, 1e-4, 1e-3")
    expect(page.get_by_text("the first of 6 jobs, one for each combination")).to_be_visible()
    page.get_by_role("button", name="Dry run").click()
    expect(page.get_by_text("With learning rate 0.001, effective batch size 16:")).to_be_visible()

    page.get_by_role("button", name="Start").click()
    page.wait_for_url(re.compile("#/sweep/sweep-"))
    expect(page.get_by_role("row")).to_have_count(7)
    expect(page.get_by_text("All jobs have ended. Best:")).to_be_visible(timeout=4 * MINUTES)
    name = page.url.rpartition("/")[2]
    sweep = service.get(f"{ROOT}/sweeps/{name}")
    assert [job["status"] for job in sweep["jobs"]] == ["succeeded"] * 6
    losses = {job["training_id"]: job["validation_loss"] for job in sweep["jobs"]}
    assert sweep["best"] == min(losses, key=lambda job: losses[job])
    best = page.get_by_role("row").filter(has_text="best")
    expect(best).to_have_count(1)
    expect(best).to_contain_text(sweep["best"][-6:])
    expect(page.get_by_label("Losses").locator(".main-svg").first).to_be_visible()
    if SCREENSHOTS:
        page.screenshot(path=Path(SCREENSHOTS) / "sweep.png", full_page=True)
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(page.get_by_role("link", name=f"sweep {name}").first).to_be_visible()


def restart(service: Accrue, meanwhile: Callable[[], None]) -> None:
    """The service goes away and comes back at the same address; the worker and its job go on."""
    process = service.processes.pop(0)
    process.terminate()
    process.wait(30)
    meanwhile()
    service.serve()
    service.processes.insert(0, service.processes.pop())


def test_a_trained_model_and_its_base_answer_side_by_side(page: Page, trained: list[str]) -> None:
    page.goto(f"./#/job/{trained[0]}")
    playground = page.get_by_role("region", name="Try the model")
    playground.get_by_label("Your message").fill("3 + 4 =")
    playground.get_by_role("button", name="Ask").click()
    for side in ("After training", "Before training"):
        answer = playground.get_by_role("article", name=side).locator(".said")
        expect(answer).not_to_be_empty(timeout=MINUTES)
    expect(playground.get_by_role("button", name="Ask")).to_be_visible(timeout=MINUTES)
    if SCREENSHOTS:
        playground.screenshot(path=f"{SCREENSHOTS}/playground.png")


def test_a_model_is_exported(page: Page, trained: list[str]) -> None:
    page.goto(f"./#/job/{trained[0]}")
    section = page.get_by_role("region", name="Export")
    section.get_by_label("Weights").select_option("bf16")
    section.get_by_role("button", name="Export").click()
    expect(section.get_by_text(re.compile("It predicts the same as the trained model in"))).to_be_visible(
        timeout=MINUTES
    )
    expect(section).to_contain_text("vllm serve")
    with page.expect_download() as downloading:
        section.get_by_role("button", name="Download the export").click()
    with tarfile.open(downloading.value.path()) as tar:
        assert {"model.safetensors", "Modelfile"} <= {Path(name).name for name in tar.getnames()}
    section.get_by_role("button", name="Delete it").click()
    expect(section.get_by_text("vllm serve")).to_be_hidden()


def test_preferences_are_learned_from_the_page(page: Page, tmp_path: Path) -> None:
    """The learning rate that is used by default follows the objective; the job's page shows the rewards."""
    pairs = tmp_path / "pairs.jsonl"
    line = '{"prompt": "Is it so? ", "chosen": "Yes.", "rejected": "No idea."}\n'
    pairs.write_text(20 * line)
    page.goto("./")
    page.get_by_label("Upload JSON lines").set_input_files(pairs)
    expect(page.get_by_text("pairs.jsonl is uploaded")).to_be_visible()
    rate = page.get_by_label("Learning rate", exact=True)
    expect(rate).to_have_attribute("placeholder", "1e-6")
    page.get_by_label("Method", exact=True).select_option("lora")
    expect(rate).to_have_attribute("placeholder", "1e-5")
    page.get_by_label("Objective", exact=True).select_option("simpo")
    plan(
        page,
        Epochs="5",
        Sequence_length="32",
        Effective_batch="4",
        Learning_rate="1e-3",
        Validation_split="0.2",
    )
    page.get_by_role("button", name="Start").click()
    page.wait_for_url(re.compile("#/job/ftjob-"))
    expect(page.get_by_label("Events, newest first")).to_contain_text(
        "Training succeeded.", timeout=2 * MINUTES
    )
    expect(page.get_by_label("Outcome")).to_contain_text("Held-out pairs in the right order")
    expect(page.locator("figure", has_text="Rewards").locator(".main-svg").first).to_be_visible()
    if SCREENSHOTS:
        page.screenshot(path=f"{SCREENSHOTS}/preferences.png", full_page=True)
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(page.get_by_role("table")).to_contain_text("simpo, lora")


def test_a_model_is_trained_further(page: Page, service: Accrue, data: Path, trained: list[str]) -> None:
    page.goto(f"./#/job/{trained[0]}")
    page.get_by_role("link", name="Train it further").click()
    page.get_by_label("Upload JSON lines").set_input_files(data)
    plan(page, Epochs="1", Sequence_length="24", Effective_batch="16")
    page.get_by_role("button", name="Start").click()
    page.wait_for_url(re.compile("#/job/ftjob-"))
    job_id = page.url.rpartition("/")[2]
    job = service.ended(job_id)
    assert job["status"] == "succeeded"
    assert trained[0].removeprefix("ftjob-") in job["model_name"]
    expect(page.get_by_role("link", name="Train it further")).to_be_visible()


def test_start_waits_for_the_upload(page: Page, data: Path) -> None:
    held: list[Route] = []
    page.route(
        "**/v1/files",
        lambda route: held.append(route) if route.request.method == "POST" else route.continue_(),
    )
    page.goto("./")
    page.get_by_label("Upload JSON lines").set_input_files(data)
    plan(page, Epochs="1", Sequence_length="24", Effective_batch="16")
    page.get_by_role("button", name="Start").click()
    expect(page.get_by_text("The file is being uploaded")).to_be_visible()
    [upload] = held
    upload.continue_()
    page.wait_for_url(re.compile("#/job/ftjob-"))


def test_the_effective_batch_updates_while_typing(page: Page) -> None:
    page.goto("./")
    label = page.locator("output")
    expect(label).to_have_text("→ Effective batch: 32")
    plan(page, Effective_batch="48")
    expect(label).to_have_text("→ Effective batch: 48")
    page.get_by_label("Set batch by").select_option("split")
    plan(page, **{"Micro-batch size": "6"}, Accumulation_steps="7")
    expect(label).to_have_text("→ Effective batch: 42")
    plan(page, Devices="3")
    expect(label).to_have_text("→ Effective batch: 126")
    plan(page, **{"Micro-batch size": "six"})
    expect(label).to_have_text(re.compile("whole numbers"))


def test_the_effective_batch_that_is_shown_is_the_one_that_is_trained(page: Page, data: Path) -> None:
    page.goto("./#/plan?batch=split&micro=6&steps=7&count=3")
    expect(page.locator("output")).to_have_text("→ Effective batch: 126")
    page.get_by_label("Upload JSON lines").set_input_files(data)
    expect(page.locator("#field-file")).to_have_value(re.compile("^file-"))
    page.get_by_role("button", name="Dry run").click()
    told = page.locator("form p", has_text="This would run")
    expect(told).to_contain_text("steps of 126 samples")
    plan(page, **{"Micro-batch size": "5"})
    expect(told).to_have_count(0)  # of what is typed now nothing was checked


def test_a_rejected_upload_clears_the_selected_file(
    page: Page, data: Path, tmp_path: Path, noticed: PageErrors
) -> None:
    page.goto("./")
    chosen = page.locator("#field-file")
    page.get_by_label("Upload JSON lines").set_input_files(data)
    expect(chosen).to_have_value(re.compile("^file-"))
    table = tmp_path / "table.csv"
    table.write_text("question,answer\n1,2\n")
    page.get_by_label("Upload JSON lines").set_input_files(table)
    expect(page.get_by_role("alert").filter(has_text="table.csv was not uploaded")).to_contain_text("Row 2")
    expect(chosen).to_have_value("")
    noticed.faults.clear()  # a browser writes every answer of 400 into its console
    page.get_by_label("Column mapping").fill("prompt=question, completion = answer")
    page.get_by_label("Upload JSON lines").set_input_files([])
    page.get_by_label("Upload JSON lines").set_input_files(table)
    expect(page.get_by_text("table.csv is uploaded")).to_be_visible()
    expect(chosen).to_have_value(re.compile("^file-"))


@pytest.mark.parametrize("kind", ["json", "csv", "parquet", "txt"])
def test_every_kind_of_file_can_be_uploaded(
    page: Page, tmp_path: Path, noticed: PageErrors, kind: str
) -> None:
    file = tmp_path / f"data.{kind}"
    rows = [{"prompt": "1+1", "completion": "2"}]
    if kind == "json":
        file.write_text(json.dumps(rows))
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text("prompt,completion\n1+1,2\n")
    page.goto("./")
    page.get_by_label("Upload JSON lines").set_input_files(file)
    expect(page.get_by_text(f"data.{kind} is uploaded")).to_be_visible()
    expect(page.locator("#field-file")).to_have_value(re.compile("^file-"))


def test_plan_settings_are_in_the_url_and_can_be_saved_under_a_name(page: Page) -> None:
    page.goto("./")
    page.get_by_label("Model", exact=True).fill("meta-llama/Llama-3.1-8B")
    plan(page, GPU_to_plan_for="24GB")
    expect(prediction(page).get_by_text("It does not fit", exact=True)).to_be_visible()
    page.get_by_role("button", name="Apply method: lora, gradient_checkpointing: true").click()
    expect(prediction(page).get_by_text(re.compile("^It fits"))).to_be_visible()
    page.get_by_label("Save this plan as").fill("llama")
    page.get_by_role("button", name="Save").click()
    page.reload()
    expect(page.get_by_label("Model", exact=True)).to_have_value("meta-llama/Llama-3.1-8B")
    expect(page.get_by_label("Method", exact=True)).to_have_value("lora")
    page.goto("./#/jobs")
    page.goto("./#/plan")
    expect(page.get_by_label("Method", exact=True)).to_have_value("full")
    page.get_by_role("button", name="llama", exact=True).click()
    expect(page.get_by_label("Method", exact=True)).to_have_value("lora")
    expect(page.get_by_label("Gradient checkpointing", exact=True)).to_be_checked()


def test_the_preview_shows_data_token_by_token(
    page: Page, service: Accrue, data: Path, noticed: PageErrors, trained: list[str]
) -> None:
    page.goto("./")
    page.get_by_label("Upload JSON lines").set_input_files(data)
    expect(page.get_by_text("sums.jsonl is uploaded")).to_be_visible()
    worker = service.start("worker", ACCRUE_PROFILER="true")
    page.get_by_role("button", name="Preview data").click()
    shown = page.get_by_role("region", name="Data")
    expect(shown.get_by_text("Line 1:")).to_be_visible(timeout=MINUTES)
    expect(shown.locator("figure mark").first).to_contain_text("<|endoftext|>")
    expect(shown.get_by_text("samples:")).to_contain_text("200 samples: 10 to 12 tokens")
    assert faults_of(page) == []
    worker.terminate()
    worker.wait(30)


def test_checked_jobs_stay_checked_after_going_back(
    page: Page, noticed: PageErrors, trained: list[str]
) -> None:
    page.goto("./#/jobs?status=succeeded")
    for job_id in trained:
        page.get_by_label(f"Compare {job_id}").check()
    page.get_by_role("button", name="Compare").click()
    expect(page.get_by_role("heading", name="Compare jobs")).to_be_visible()
    page.go_back()
    for job_id in trained:
        expect(page.get_by_label(f"Compare {job_id}")).to_be_checked()
    expect(page.get_by_role("button", name="Compare")).to_be_enabled()


def test_a_term_s_explanation_is_shown_next_to_it(page: Page, noticed: PageErrors) -> None:
    page.goto("./")
    requested = page.get_by_role("button", name="What is this?").nth(2)
    requested.click()
    shown = page.locator(".meaning:popover-open")
    expect(shown).to_be_visible()
    button, meaning = requested.bounding_box(), shown.bounding_box()
    assert button is not None
    assert meaning is not None
    assert 0 <= meaning["y"] - (button["y"] + button["height"]) < 30
    assert meaning["x"] <= button["x"] + button["width"] <= meaning["x"] + meaning["width"] + 30


def test_an_unknown_address_shows_an_error(page: Page, noticed: PageErrors) -> None:
    page.goto("./#/nowhere")
    expect(page.get_by_text("There is no page nowhere here.")).to_be_visible()


def test_the_interface_is_documented_without_another_host(page: Page, noticed: PageErrors) -> None:
    page.goto("./docs")
    expect(page.get_by_text("Train with given accumulation steps")).to_be_visible(timeout=20_000)


def test_an_error_is_shown_next_to_its_field(page: Page, noticed: PageErrors) -> None:
    page.goto("./")
    page.get_by_label("Model", exact=True).fill("nobody/knows-this")
    expect(page.locator("#wrong-model")).to_contain_text("ACCRUE_MODELS_DIR")
    page.get_by_label("Model", exact=True).fill("accrue/tiny-gpt2")
    expect(prediction(page).get_by_text(re.compile("^It fits"))).to_be_visible()
    expect(page.locator("#wrong-model")).to_be_empty()
    plan(page, Sequence_length="abc")
    expect(page.locator("#wrong-length")).to_contain_text("integer")
    plan(page, Sequence_length="", Epochs="0", Learning_rate="fast")
    page.get_by_role("button", name="Start").click()
    expect(page.locator("#wrong-epochs")).to_contain_text("whole number")
    expect(page.locator("#wrong-rate")).to_contain_text("Numbers above zero")
    expect(page.locator("#wrong-file")).to_contain_text("Choose a file")
    noticed.faults.clear()  # a browser writes every answer of 422 into its console


def test_buttons_do_not_move_while_a_job_is_running(page: Page, service: Accrue, data: Path) -> None:
    file_id = service.upload(data.read_bytes())
    job_id = service.submit(
        dataset_config={"file_id": file_id, "max_length": 24}, training_config={"epochs": 2000}
    )
    for address, heading in ((f"job/{job_id}", "accrue/tiny-gpt2"), ("jobs", "Jobs")):
        page.goto(f"./#/{address}")
        expect(page.get_by_role("heading", level=1)).to_have_text(heading)
        expect(page.locator(".badge.running").first).to_be_visible(timeout=MINUTES)
        button = page.get_by_role("button", name=f"Pause job {job_id[-6:]}").element_handle()
        assert button is not None
        before = service.job(job_id)["progress"]["step"]
        until(lambda: service.job(job_id)["progress"]["step"] > before + 5)  # noqa: B023
        page.wait_for_timeout(2500)
        assert button.is_visible(), address  # the very one, not another in its place
    service.post(f"{ROOT}/training/{job_id}/cancel")


def test_jobs_can_be_cancelled_and_deleted(page: Page, service: Accrue, data: Path) -> None:
    file_id = service.upload(data.read_bytes())
    job_id = service.submit(dataset_config={"file_id": file_id}, auto_start=False, user_id="alice")
    page.goto("./#/jobs?status=paused&user_id=alice")
    row = page.get_by_role("row").filter(has=page.locator(f"a[href='#/job/{job_id}']"))
    expect(row).to_contain_text("paused")
    page.on("dialog", lambda dialog: dialog.accept())
    row.get_by_role("button", name="Cancel").click()
    expect(page.get_by_text("No jobs match")).to_be_visible()
    page.get_by_label("Status").select_option("cancelled")
    row.get_by_role("button", name="Delete").click()
    expect(row).to_have_count(0)
    assert service.http.get(f"{ROOT}/training/{job_id}").status_code == 404


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_every_page_is_accessible_and_fits(
    browser: Browser,
    service: Accrue,
    noticed: PageErrors,
    trained: list[str],
    scheme: str,
    size: tuple[int, int],
) -> None:
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, base_url=f"{service.url}/",
        color_scheme=scheme, reduced_motion="reduce",
    )  # fmt: skip
    page = context.new_page()
    noticed.watch(page)
    pages = {
        "plan": ("plan?model=meta-llama%2FLlama-3.1-8B&method=lora&checkpointing=true&gpus=24GB", "It fits"),
        "jobs": ("jobs", "took"),
        "job": (f"job/{trained[1]}", "Result"),
        "compare": (f"compare?ids={','.join(trained)}", "× "),
        "gpus": ("gpus", "alive"),
        "recommendations": (f"recommendations?training_id={trained[1]}", "Plan with these values"),
    }
    for name, (address, shown) in pages.items():
        page.goto(f"./#/{address}")
        expect(page.get_by_text(shown).filter(visible=True).first).to_be_visible(timeout=20_000)
        page.wait_for_timeout(800)  # for charts
        found = Axe().run(page).response["violations"]
        serious = [
            f"{each['id']}: {each['nodes'][0]['html']}"
            for each in found
            if each["impact"] in ("serious", "critical")
        ]
        assert serious == [], name
        assert page.evaluate("document.documentElement.scrollWidth") <= size[0], (
            f"{name} is wider than the screen"
        )
        if SCREENSHOTS:
            kind = "desktop" if size == DESKTOP else "phone"
            page.screenshot(path=Path(SCREENSHOTS) / f"{name}-{kind}-{scheme}.png", full_page=True)
    context.close()


def faults_of(page: Page) -> list[str]:
    """The serious accessibility problems that axe finds."""
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['nodes'][0]['html']}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


def test_everything_works_by_keyboard(page: Page) -> None:
    page.goto("./#/jobs")
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    expect(page.get_by_role("heading", name="Jobs")).to_be_visible()
    page.reload()
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Plan")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Plan a job")).to_be_visible()
    page.get_by_role("button", name="What is this?").first.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("note").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("note").first).to_be_hidden()


def test_a_job_that_could_not_be_started_is_reported(page: Page, data: Path, noticed: PageErrors) -> None:
    page.goto("./")
    page.get_by_label("Upload JSON lines").set_input_files(data)
    expect(page.get_by_text("sums.jsonl is uploaded")).to_be_visible()
    page.route("**/with-accumulation", lambda route: route.abort())
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_role("alert").filter(has_text="press Start again")).to_be_visible()
    expect(page.get_by_text("The service does not answer")).to_be_hidden(timeout=10_000)  # it does by now
    page.unroute("**/with-accumulation")
    page.get_by_role("button", name="Start", exact=True).click()
    page.wait_for_url("**/#/job/*")
    page.on("dialog", lambda dialog: dialog.accept())
    page.get_by_role("button", name=re.compile("Cancel job")).click()
    expect(page.get_by_role("button", name=re.compile("Train again job"))).to_be_visible(timeout=60_000)
    noticed.faults.clear()  # a browser writes each request that fails into its console


def test_the_page_requests_an_api_key_if_one_is_required(browser: Browser, tmp_path: Path) -> None:
    with running(tmp_path) as accrue:
        key = accrue.command("keys", "create", "alice").stdout.strip()
        accrue.serve()
        page = browser.new_context(base_url=f"{accrue.url}/").new_page()
        page.goto("./#/jobs")
        expect(page.get_by_role("dialog", name="API key")).to_be_visible()
        page.get_by_label("Key", exact=True).fill(key)
        page.get_by_role("button", name="Save key").click()
        expect(page.get_by_text("No jobs yet")).to_be_visible()
        page.reload()
        expect(page.get_by_text("No jobs yet")).to_be_visible()
        page.context.close()
