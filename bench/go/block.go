// Calls that block in the kernel.
package main

import (
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

const (
	blockers   = 64
	blocksEach = 20
	blockFor   = 5 * time.Millisecond
)

func blocking(call func()) {
	var wg sync.WaitGroup
	for range blockers {
		wg.Go(func() {
			for range blocksEach {
				call()
			}
		})
	}
	wg.Wait()
}

// blockStd tells the scheduler, as every call of package syscall and os does.
func blockStd(a args) report {
	m := newMeter(a, blockers*blocksEach)
	for m.anotherRound() {
		blocking(func() {
			rest := syscall.NsecToTimespec(int64(blockFor))
			for syscall.Nanosleep(&rest, &rest) == syscall.EINTR {
			}
		})
	}
	return m.report()
}

// blockRaw does not tell the scheduler, so each P has one call at a time: 3 s. One round, then,
// and no warm-up.
func blockRaw(args) report {
	var stop atomic.Bool
	late := make(chan []time.Duration)
	go func() { late <- ticking(stop.Load) }()
	start := time.Now()
	blocking(func() {
		rest := syscall.NsecToTimespec(int64(blockFor))
		for {
			_, _, e := syscall.RawSyscall(syscall.SYS_NANOSLEEP,
				uintptr(unsafe.Pointer(&rest)), uintptr(unsafe.Pointer(&rest)), 0)
			if e != syscall.EINTR {
				return
			}
		}
	})
	took := time.Since(start)
	stop.Store(true)
	return lateness(report{"ms_per_round": took.Seconds() * 1e3}, <-late)
}
