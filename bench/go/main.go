// The Go worker: the same workloads as the Rust workers, as a Go programmer writes them.
// Called as `worker WORKLOAD [KEY=VALUE …]`, prints one JSON object. GOMAXPROCS comes from the
// environment. Sizes and the meter mirror common/src/lib.rs.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	spawnBatch   = 1000
	yielders     = 4
	yieldsEach   = 20_000
	fibN         = 27
	fibSpawns    = 317_810 // calls with n >= 2: F(28) - 1; each spawns once
	fibResult    = 196_418
	skynetLeaves = 1_000_000
	skynetResult = skynetLeaves * (skynetLeaves - 1) / 2
	chunks       = 10_000
	chunkSteps   = 7_500
	chunksResult = 11_209_390_254_633_036_983 // wrapping sum
	live         = 1_000_000
	settle       = 50 * time.Millisecond
)

type report map[string]float64

func main() {
	if len(os.Args) < 2 {
		fail("usage: worker WORKLOAD [KEY=VALUE …]")
	}
	a := parse(os.Args[2:])
	workloads := map[string]func(args) report{
		"spawn_join": spawnJoin,
		"yield":      func(a args) report { return yield(a, yielders) },
		"switch":     func(a args) report { return yield(a, 2) },
		"fib":        fibJoin,
		"skynet":     skynet,
		"forkjoin":   forkJoin,
		"live1m":     live1m,

		"pingpong_1p":  pingPong,
		"pingpong_2p":  pingPong,
		"spsc_128":     spsc,
		"mpmc_4x4_128": mpmc,
		"select_unbuf": func(a args) report { return selects(a, 0) },
		"select_128":   func(a args) report { return selects(a, slots) },
		"skynet_chan":  skynet,
		"ring_1000":    ring,
		"sieve_2000":   sieve,
		"mutex_8":      mutexes,

		"alloc_small":   allocSmall,
		"alloc_mixed":   allocMixed,
		"alloc_handoff": allocHandoff,

		"sleep_1000":   sleep1000,
		"sleep_100k":   sleep100k,
		"sleep_burst":  sleepBurst,
		"sleep_short":  sleepShort,
		"ticker_hogs":  tickerHogs,
		"wake_idle":    wakeIdle,
		"tickers_1000": tickers1000,
		"block_std":    blockStd,
		"block_raw":    blockRaw,

		"echo_64":   func(a args) report { return echo(a, 64) },
		"echo_1000": func(a args) report { return echo(a, 1_000) },

		"echo_64_pairs":   func(a args) report { return echoPairs(a, 64) },
		"echo_1000_pairs": func(a args) report { return echoPairs(a, 1_000) },

		"idle_conns":     idleConns,
		"conns_idle_10k": mostlyIdle,

		"http_64":      func(a args) report { return httpHello(a, 64) },
		"http_512":     func(a args) report { return httpHello(a, 512) },
		"http_64_hogs": func(a args) report { return httpHelloHogs(a, 64) },
	}
	workload, ok := workloads[os.Args[1]]
	if !ok {
		fail("this worker has no workload named " + os.Args[1])
	}
	line, err := json.Marshal(workload(a))
	if err != nil {
		fail(err.Error())
	}
	fmt.Println(string(line))
}

func spawnJoin(a args) report {
	m := newMeter(a, spawnBatch)
	var wg sync.WaitGroup
	for m.anotherRound() {
		wg.Add(spawnBatch)
		for range spawnBatch {
			go func() { wg.Done() }()
		}
		wg.Wait()
	}
	return m.report()
}

// yield has n goroutines that yield and do nothing else: `yield` with four, `switch` with two.
func yield(a args, n int) report {
	m := newMeter(a, n*yieldsEach)
	var wg sync.WaitGroup
	for m.anotherRound() {
		for range n {
			wg.Go(func() {
				for range yieldsEach {
					runtime.Gosched()
				}
			})
		}
		wg.Wait()
	}
	return m.report()
}

// fib joins by a channel of one slot, which also carries the result.
func fib(n int) int {
	if n < 2 {
		return n
	}
	left := make(chan int, 1)
	go func() { left <- fib(n - 1) }()
	right := fib(n - 2)
	return <-left + right
}

func fibJoin(a args) report {
	m := newMeter(a, fibSpawns)
	for m.anotherRound() {
		check(fib(fibN) == fibResult)
	}
	return m.report()
}

// node is one node of the skynet: it sends the sum of the leaves from first on to its parent.
func node(parent chan<- int, first, leaves int) {
	if leaves == 1 {
		parent <- first
		return
	}
	sums := make(chan int)
	each := leaves / 10
	for i := range 10 {
		go node(sums, first+i*each, each)
	}
	sum := 0
	for range 10 {
		sum += <-sums
	}
	parent <- sum
}

func skynet(a args) report {
	m := newMeter(a, skynetLeaves)
	for m.anotherRound() {
		root := make(chan int)
		go node(root, 0, skynetLeaves)
		check(<-root == skynetResult)
	}
	return m.report()
}

func chunk(seed uint64) uint64 {
	x := seed + 1
	for range chunkSteps {
		x = step(x)
	}
	return x
}

func step(x uint64) uint64 {
	return (x ^ (x >> 29)) * 0xbf58_476d_1ce4_e5b9
}

func forkJoin(a args) report {
	m := newMeter(a, chunks)
	results := make([]uint64, chunks)
	var wg sync.WaitGroup
	for m.anotherRound() {
		for i := range results {
			wg.Go(func() { results[i] = chunk(uint64(i)) })
		}
		wg.Wait()
		var sum uint64
		for _, r := range results {
			sum += r
		}
		check(sum == chunksResult)
	}
	return m.report()
}

func live1m(a args) report {
	n := a.number("n", live)
	release := make(chan struct{})
	var ready, ended sync.WaitGroup

	rssBefore, pteBefore := memory()
	start := time.Now()
	ready.Add(n)
	ended.Add(n)
	for range n {
		go func() {
			ready.Done()
			<-release
			ended.Done()
		}()
	}
	ready.Wait()
	create := time.Since(start)

	time.Sleep(settle)
	rss, pte := memory()

	start = time.Now()
	close(release)
	ended.Wait()
	end := time.Since(start)

	eachUs := func(d time.Duration) float64 { return d.Seconds() * 1e6 / float64(n) }
	return report{
		"total_us":  eachUs(create + end),
		"create_us": eachUs(create),
		"end_us":    eachUs(end),
		"rss_bytes": (rss - rssBefore) / float64(n),
		"pte_bytes": (pte - pteBefore) / float64(n),
	}
}

// A meter counts rounds of ops operations: it warms up for a quarter of the budget, then
// measures for the budget; at least one round of each.
type meter struct {
	budget time.Duration
	ops    int
	phase  int // 0 fresh, 1 warm-up, 2 measuring
	rounds int
	wall   time.Time
	cpu    time.Duration
}

func newMeter(a args, ops int) *meter {
	return &meter{budget: time.Duration(a.number("ms", 500)) * time.Millisecond, ops: ops}
}

func (m *meter) anotherRound() bool {
	switch {
	case m.phase == 0, m.phase == 1 && time.Since(m.wall) >= m.budget/4:
		m.phase++
		m.cpu = cpuTime()
		m.wall = time.Now()
	case m.phase == 2:
		m.rounds++
		return time.Since(m.wall) < m.budget
	}
	return true
}

func (m *meter) report() report {
	wall := time.Since(m.wall).Seconds()
	cpu := (cpuTime() - m.cpu).Seconds()
	return report{
		"ns_per_op":    wall * 1e9 / float64(m.rounds*m.ops),
		"per_s":        float64(m.rounds*m.ops) / wall,
		"ms_per_round": wall * 1e3 / float64(m.rounds),
		"cores":        cpu / wall,
		"rounds":       float64(m.rounds),
	}
}

// cpuTime is what this process has used, user and system.
func cpuTime() time.Duration {
	var usage syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &usage); err != nil {
		fail(err.Error())
	}
	return time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
}

// memory reads resident memory and page tables of this process, in bytes.
func memory() (rss, pte float64) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		fail(err.Error())
	}
	for line := range strings.Lines(string(status)) {
		fields := strings.Fields(line)
		switch fields[0] {
		case "VmRSS:":
			rss = kib(fields[1])
		case "VmPTE:":
			pte = kib(fields[1])
		}
	}
	return rss, pte
}

func kib(text string) float64 {
	n, err := strconv.Atoi(text)
	if err != nil {
		fail(err.Error())
	}
	return float64(n) * 1024
}

type args map[string]string

func parse(words []string) args {
	a := args{}
	for _, word := range words {
		key, value, ok := strings.Cut(word, "=")
		if !ok {
			fail("not KEY=VALUE: " + word)
		}
		a[key] = value
	}
	return a
}

func (a args) number(key string, fallback int) int {
	text, ok := a[key]
	if !ok {
		return fallback
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		fail("not a number: " + key + "=" + text)
	}
	return n
}

func check(ok bool) {
	if !ok {
		fail("wrong result")
	}
}

func fail(why string) {
	fmt.Fprintln(os.Stderr, why)
	os.Exit(2)
}
