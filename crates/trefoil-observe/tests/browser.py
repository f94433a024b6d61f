#!/usr/bin/env python3
"""Opens the page of a program in a real Chromium and uses it.

    browser.py PROGRAM [SCREENSHOT]

PROGRAM is the built example `observed`. Chromium is driven through its debugging pipe (descriptors 3
and 4, one JSON object per message), so nothing but Python is needed. Without Chromium the script
prints a line that begins with `skipped:` and succeeds.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time

WAIT_SECONDS = 90
NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]


class Browser:
    """A Chromium with one page."""

    def __init__(self, binary, profile):
        to_browser, to_write = os.pipe()
        to_read, from_browser = os.pipe()

        def give_descriptors():
            # Copies first: 3 and 4 may be among the pipes.
            read, write = os.dup(to_browser), os.dup(from_browser)
            high_read, high_write = os.dup2(read, 60), os.dup2(write, 61)
            os.dup2(high_read, 3)
            os.dup2(high_write, 4)
            os.close(60)
            os.close(61)

        self.process = subprocess.Popen(
            [binary, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
             "--no-first-run", "--window-size=1400,1900", f"--user-data-dir={profile}",
             "--remote-debugging-pipe", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            close_fds=False, preexec_fn=give_descriptors)
        os.close(to_browser)
        os.close(from_browser)
        self.write, self.read = to_write, to_read
        self.buffer, self.next_id, self.session = b"", 0, None
        self.requests, self.problems = [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ["Page", "Runtime", "Network", "Log"]:
            self.call(domain + ".enable")

    def receive(self, deadline):
        while b"\0" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.read], [], [], left)[0]:
                raise TimeoutError("Chromium does not answer")
            chunk = os.read(self.read, 1 << 20)
            if not chunk:
                raise EOFError("Chromium has ended")
            self.buffer += chunk
        message, self.buffer = self.buffer.split(b"\0", 1)
        message = json.loads(message)
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(params["exceptionDetails"].get("exception", {}).get("description"))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            # Browsers ask for an icon by themselves.
            if not params["entry"].get("url", "").endswith("/favicon.ico"):
                self.problems.append(params["entry"]["text"])
        return message

    def call(self, method, **params):
        self.next_id += 1
        message = {"id": self.next_id, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.write, data):]
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            answer = self.receive(deadline)
            if answer.get("id") == self.next_id:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def evaluate(self, expression):
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def until(self, what, expression):
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            value = self.evaluate(expression)
            if value:
                return value
            if time.monotonic() > deadline:
                shown = self.evaluate("document.body.innerText")
                raise TimeoutError(f"{what}\n{shown}\n{self.problems}")
            time.sleep(0.1)

    def end(self):
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def check(condition, what):
    if not condition:
        raise AssertionError(what)
    print(f"ok: {what}")


def use_the_page(browser, url):
    browser.call("Page.navigate", url=url)
    rows = "[...document.querySelectorAll('#groups tr.group')]"
    browser.until("no groups are shown", f"{rows}.length >= 3")
    text = browser.evaluate(f"{rows}.map(row => row.innerText).join('\\n')")
    check("1,000" in text and "observed::leak" in text and "chan receive" in text,
          "the groups of the program are shown")
    check(browser.evaluate("document.title") == "observed · trefoil", "the title names the program")
    tiles = browser.evaluate("document.getElementById('tiles').innerText")
    check("goroutines" in tiles and "threads" in tiles, "the numbers are shown")

    browser.evaluate("document.querySelector('#every').value = '500';"
                     "document.querySelector('#every').dispatchEvent(new Event('change'))")
    browser.until("the leak is not suspected",
                  "document.getElementById('suspects').innerText.includes('observed::leak')")
    check(True, "a group that only grows is a suspect")
    blank = ("(c => !c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(b => b))"
             "(document.getElementById('%s'))")
    for name in ["chart-goroutines", "chart-ps", "chart-threads", "latency-scheduling"]:
        check(not browser.evaluate(blank % name), f"{name} is drawn")

    # Not while the page is paused: the leaker may be runnable in the state that is then shown.
    browser.evaluate("document.getElementById('filter').value = 'leak sleep';"
                     "document.getElementById('filter').dispatchEvent(new Event('input'))")
    browser.until("the filter does not leave one group",
                  f"{rows}.length === 1 && {rows}[0].innerText.includes('observed::leak')")
    check(True, "the filter leaves the matching group")
    browser.evaluate("document.getElementById('filter').value = '';"
                     "document.getElementById('filter').dispatchEvent(new Event('input'))")

    browser.evaluate("document.getElementById('pause').click()")
    browser.evaluate("document.querySelector('th[data-sort=count]').click()")
    counts = browser.evaluate(f"{rows}.map(row => Number(row.cells[0].innerText.replace(/,/g, '')))")
    check(counts == sorted(counts), "a click on a heading sorts the other way")
    browser.evaluate("document.getElementById('filter').value = 'leak receive';"
                     "document.getElementById('filter').dispatchEvent(new Event('input'))")
    browser.evaluate(f"{rows}[0].click()")
    browser.until("no stack is shown",
                  "document.querySelector('#groups pre')?.innerText.includes('recv')")
    check(True, "a click on a group shows a stack")

    deadlock = browser.evaluate("document.querySelector('#deadlocks .certain')?.innerText ?? ''")
    check("2 goroutines wait for each other" in deadlock and "observed::lock_both" in deadlock,
          f"a certain deadlock is told in words: {deadlock!r}")
    waits = browser.evaluate("document.getElementById('waits').innerText")
    check(waits.count("waits for Mutex") >= 2, "who waits for whom is shown")
    check(browser.evaluate("document.querySelectorAll('#usage tr').length") >= 1,
          "who uses the CPUs is shown")

    browser.evaluate("document.getElementById('profile-goroutine').click()")
    browser.until("no profile", "/goroutine.pb: [0-9,]{3,} bytes/"
                  ".test(document.getElementById('taken').innerText)")
    check(True, "the profile button fetches a profile")
    browser.evaluate("document.getElementById('seconds').value = '1';"
                     "document.getElementById('profile-profile').click()")
    browser.until("no CPU profile", "/profile.pb: [0-9,]{3,} bytes/"
                  ".test(document.getElementById('taken').innerText)")
    check(True, "the button for a CPU profile fetches one")
    browser.evaluate("document.getElementById('snapshot').click()")
    browser.until("no snapshot", "/perfetto-trace: [0-9,]{5,} bytes/"
                  ".test(document.getElementById('taken').innerText)")
    check(True, "the snapshot button records and fetches a snapshot")

    outside = [r for r in browser.requests if not r.startswith((url, "blob:", "data:", "about:"))]
    check(not outside and len(browser.requests) >= 5, f"no outside request: {outside}")
    check(not browser.problems, f"no errors: {browser.problems}")


def main():
    program = sys.argv[1]
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    if binary is None:
        print("skipped: the page in a browser: Chromium is not available")
        return
    observed = subprocess.Popen([program, "127.0.0.1:0", "1000"], stderr=subprocess.PIPE, text=True)
    browser = None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        try:
            line = observed.stderr.readline()
            url = line.strip().removeprefix("observe at ")
            check(url.startswith("http://127.0.0.1:"), f"the program says where it is: {line!r}")
            browser = Browser(binary, profile)
            use_the_page(browser, url)
            if len(sys.argv) > 2:
                picture = browser.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]
                with open(sys.argv[2], "wb") as file:
                    file.write(base64.b64decode(picture))
        finally:
            if browser:
                browser.end()
            observed.kill()
            observed.wait()


if __name__ == "__main__":
    main()
