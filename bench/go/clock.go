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

func sleep1000(a args) report { return sleeping(a.number("n", sleepers), sleepsEach, 0) }

func sleep100k(a args) report { return sleeping(a.number("n", sleepersMany), 1, sleepBase) }

func sleeping(n, each int, base time.Duration) report {
	late := make([]time.Duration, n*each)
	cpu := cpuTime()
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			for k := range each {
				d := base + sleepTime(i, k)
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
