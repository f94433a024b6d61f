// Sleeping, ticking and waking: how late.
package main

import (
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	sleepers     = 1_000
	sleepsEach   = 5
	sleepersMany = 100_000
	sleepBase    = 500 * time.Millisecond // on top, where they are many: all are there by then
	burstSleep   = 500 * time.Millisecond // the longest sleep of sleep_burst
	shortEach    = 10
	shortSleep   = 100 * time.Millisecond // the longest sleep of sleep_short
	tickers      = 1_000
	tickerPeriod = 100 * time.Millisecond
	tickersWarm  = 500 * time.Millisecond
	tickersMs    = 6_000
	hogs         = 4
	tickHogsMs   = 3_000
	tick         = time.Millisecond
	idle         = 2 * time.Millisecond
	wakesMs      = 1_500
)

// sleepTime is the k-th sleep of the i-th goroutine: 1 to 100 ms.
func sleepTime(i, k int) time.Duration {
	return time.Duration(1_000+(i*7_919+k*104_729)%99_000) * time.Microsecond
}

func sleep1000(a args) report { return sleeping(a.number("n", sleepers), sleepsEach, sleepTime) }

func sleep100k(a args) report {
	d := func(i, k int) time.Duration { return sleepBase + sleepTime(i, k) }
	return sleeping(a.number("n", sleepersMany), 1, d)
}

// sleepBurst measures how late each wakes from where it began to sleep, and from where it was
// spawned.
func sleepBurst(a args) report {
	n := a.number("n", sleepersMany)
	fromSleep, fromSpawn := make([]time.Duration, n), make([]time.Duration, n)
	var wg sync.WaitGroup
	for i := range n {
		spawned := time.Now()
		wg.Go(func() {
			d := partOf(burstSleep, i)
			started := time.Now()
			time.Sleep(d)
			fromSleep[i], fromSpawn[i] = time.Since(started)-d, time.Since(spawned)-d
		})
	}
	wg.Wait()
	r := lateness(report{}, fromSpawn)
	r["spawn_p50_ms"], r["spawn_p99_ms"] = r["p50_us"]/1e3, r["p99_ms"]
	return lateness(r, fromSleep)
}

func sleepShort(a args) report {
	d := func(i, k int) time.Duration { return partOf(shortSleep, i*shortEach+k) }
	return sleeping(a.number("n", sleepers), shortEach, d)
}

// partOf is a random part of a time, in whole microseconds.
func partOf(whole time.Duration, i int) time.Duration {
	return time.Duration(random(uint64(i))%uint64(whole.Microseconds())) * time.Microsecond
}

// random is the i-th number of a fixed sequence, the same in every worker: splitmix64.
func random(i uint64) uint64 {
	x := (i + 1) * 0x9e37_79b9_7f4a_7c15
	x = (x ^ (x >> 30)) * 0xbf58_476d_1ce4_e5b9
	x = (x ^ (x >> 27)) * 0x94d0_49bb_1331_11eb
	return x ^ (x >> 31)
}

func sleeping(n, each int, sleepTime func(i, k int) time.Duration) report {
	late := make([]time.Duration, n*each)
	cpu := cpuTime()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			for k := range each {
				d := sleepTime(i, k)
				start := time.Now()
				time.Sleep(d)
				late[i*each+k] = time.Since(start) - d
			}
		})
	}
	wg.Wait()
	r := report{"cpu_s": (cpuTime() - cpu).Seconds()}
	return lateness(r, late)
}

// tickers1000 has tickers whose phases are spread over a period.
func tickers1000(a args) report {
	start := time.Now()
	begin := start.Add(tickersWarm)
	end := begin.Add(time.Duration(a.number("ms", tickersMs)) * time.Millisecond)
	n := a.number("n", tickers)
	late := make([][]time.Duration, n)
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			time.Sleep(time.Until(start.Add(tickerPeriod + partOf(tickerPeriod, i))))
			next := time.Now().Add(tickerPeriod)
			ticker := time.NewTicker(tickerPeriod)
			defer ticker.Stop()
			for next.Before(end) {
				<-ticker.C
				after := time.Since(next)
				if !next.Before(begin) {
					late[i] = append(late[i], after)
				}
				next = next.Add((after/tickerPeriod + 1) * tickerPeriod) // what was missed is left out
			}
		})
	}
	time.Sleep(time.Until(begin))
	share := newCPUShare()
	time.Sleep(time.Until(end))
	r := share.report()
	wg.Wait()
	return lateness(r, slices.Concat(late...))
}

// A cpuShare counts CPU time per minute of wall clock.
type cpuShare struct {
	wall time.Time
	cpu  time.Duration
}

func newCPUShare() cpuShare { return cpuShare{time.Now(), cpuTime()} }

func (c cpuShare) report() report {
	wall, cpu := time.Since(c.wall), cpuTime()-c.cpu
	return report{"cpu_s_per_min": cpu.Seconds() / wall.Seconds() * 60}
}

// ticking wakes every millisecond until told to stop; how late each time. What was missed is
// left out, as a ticker does.
func ticking(stop func() bool) []time.Duration {
	var late []time.Duration
	next := time.Now().Add(tick)
	for !stop() {
		time.Sleep(time.Until(next))
		late = append(late, time.Since(next))
		next = next.Add(tick)
		if now := time.Now(); next.Before(now) {
			next = now.Add(tick)
		}
	}
	return late
}

// A padded counter has a cache line of its own.
type padded struct {
	atomic.Uint64
	_ [56]byte
}

func tickerHogs(a args) report {
	var stop atomic.Bool
	var work [hogs]padded
	var results [hogs]uint64 // for the compiler: the work is needed
	var wg sync.WaitGroup
	for h := range hogs {
		wg.Go(func() {
			x := uint64(h)
			for !stop.Load() {
				x = chunk(x)
				work[h].Add(1)
			}
			results[h] = x
		})
	}
	start := time.Now()
	budget := time.Duration(a.number("ms", tickHogsMs)) * time.Millisecond
	late := ticking(func() bool { return time.Since(start) >= budget })
	stop.Store(true)
	took := time.Since(start)
	var least, all float64
	for h := range hogs {
		n := float64(work[h].Load())
		if h == 0 || n < least {
			least = n
		}
		all += n
	}
	wg.Wait()
	check(!slices.Contains(results[:], 0))
	r := report{"least_percent": least / all * 100, "chunks_per_ms": all / took.Seconds() / 1e3}
	return lateness(r, late)
}

// wakeIdle sends from a thread that was asleep in the kernel, while nothing else runs.
func wakeIdle(a args) report {
	sent := make(chan time.Time, 1)
	budget := time.Duration(a.number("ms", wakesMs)) * time.Millisecond
	go func() {
		runtime.LockOSThread()
		for range budget / idle {
			rest := syscall.NsecToTimespec(int64(idle))
			for syscall.Nanosleep(&rest, &rest) == syscall.EINTR {
			}
			sent <- time.Now()
		}
		close(sent)
	}()
	var late []time.Duration
	for at := range sent {
		late = append(late, time.Since(at))
	}
	return lateness(report{}, late)
}

// lateness adds quantiles of what was measured to a report.
func lateness(r report, late []time.Duration) report {
	slices.Sort(late)
	us := func(q float64) float64 {
		return late[int(float64(len(late)-1)*q)].Seconds() * 1e6
	}
	r["p50_us"], r["p99_us"], r["max_us"] = us(0.5), us(0.99), us(1)
	r["p99_ms"] = us(0.99) / 1e3
	return r
}
