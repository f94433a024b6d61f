// Go's own benchmarks: names, sizes and what they do as in Go's packages runtime, sync and time, written anew here and in
// trefoil/src/gobench.rs, so that both sides do the same. Left out is what has no counterpart (pools, maps, semaphores
// that only the runtime can reach), and variants that tell the same.
package main

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

const (
	burst    = 100     // items that a goroutine sends before it takes as many
	batch    = 1_000   // items that a producer claims at a time
	popular  = 1_000   // goroutines that wait for the popular channel
	workload = 30      // steps of arithmetic, about what Go's takes
	garbage  = 1 << 15 // timers that lie around on each P
	crowd    = 1_000   // timers or sleepers of a round
)

// work is arithmetic that takes the same time in Rust.
func work(x uint64) uint64 {
	for range workload {
		x = (x ^ (x >> 29)) * 0xbf58_476d_1ce4_e5b9
	}
	return x
}

func BenchmarkChanNonblocking(b *testing.B) {
	ch := make(chan int)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			select {
			case <-ch:
			default:
			}
		}
	})
}

func BenchmarkChanUncontended(b *testing.B) {
	b.RunParallel(func(pb *testing.PB) { bursts(pb, make(chan int, burst)) })
}

func BenchmarkChanContended(b *testing.B) {
	ch := make(chan int, burst*runtime.GOMAXPROCS(0))
	b.RunParallel(func(pb *testing.PB) { bursts(pb, ch) })
}

func bursts(pb *testing.PB, ch chan int) {
	for pb.Next() {
		for range burst {
			ch <- 0
		}
		for range burst {
			<-ch
		}
	}
}

func BenchmarkChanSync(b *testing.B) {
	ch, done := make(chan int), make(chan bool)
	go func() {
		for range b.N / 2 {
			ch <- 0
			<-ch
		}
		done <- true
	}()
	for range b.N / 2 {
		<-ch
		ch <- 0
	}
	<-done
}

func BenchmarkChanProdCons0(b *testing.B)   { prodCons(b, 0) }
func BenchmarkChanProdCons10(b *testing.B)  { prodCons(b, 10) }
func BenchmarkChanProdCons100(b *testing.B) { prodCons(b, 100) }

// prodCons has a producer and a consumer for each P, all on one channel; a zero ends a consumer.
func prodCons(b *testing.B, slots int) {
	var left atomic.Int64
	left.Store(int64(b.N / batch))
	ch := make(chan int, slots)
	var wg sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				for range batch {
					ch <- 1
				}
			}
			ch <- 0
		})
		wg.Go(func() {
			for <-ch != 0 {
			}
		})
	}
	wg.Wait()
}

func BenchmarkChanCreation(b *testing.B) {
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			ch := make(chan int, 1)
			ch <- 0
			<-ch
		}
	})
}

func BenchmarkChanSem(b *testing.B) {
	ch := make(chan struct{}, runtime.GOMAXPROCS(0))
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			ch <- struct{}{}
			<-ch
		}
	})
}

func BenchmarkChanPopular(b *testing.B) {
	shared := make(chan bool)
	own := make([]chan bool, popular)
	var wg sync.WaitGroup
	for i := range own {
		own[i] = make(chan bool)
		wg.Go(func() {
			mine := own[i]
			for range b.N {
				select {
				case <-shared:
				case <-mine:
				}
			}
		})
	}
	for range b.N {
		for _, ch := range own {
			ch <- true
		}
	}
	wg.Wait()
}

func BenchmarkChanClosed(b *testing.B) {
	ch := make(chan struct{})
	close(ch)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			select {
			case <-ch:
			default:
				b.Error("it is closed")
			}
		}
	})
}

func BenchmarkSelectUncontended(b *testing.B) {
	b.RunParallel(func(pb *testing.PB) { toAndFro(pb, make(chan int, 1), make(chan int, 1)) })
}

func BenchmarkSelectAsyncContended(b *testing.B) {
	procs := runtime.GOMAXPROCS(0)
	c1, c2 := make(chan int, procs), make(chan int, procs)
	b.RunParallel(func(pb *testing.PB) { toAndFro(pb, c1, c2) })
}

// toAndFro takes a token out of one channel, whichever has it, and puts it into the other.
func toAndFro(pb *testing.PB, c1, c2 chan int) {
	c1 <- 0
	for pb.Next() {
		select {
		case <-c1:
			c2 <- 0
		case <-c2:
			c1 <- 0
		}
	}
}

func BenchmarkSelectSyncContended(b *testing.B) {
	c1, c2, c3, done := make(chan int), make(chan int), make(chan int), make(chan bool)
	b.RunParallel(func(pb *testing.PB) {
		go func() {
			for {
				select {
				case c1 <- 0:
				case c2 <- 0:
				case c3 <- 0:
				case <-done:
					return
				}
			}
		}()
		for pb.Next() {
			select {
			case <-c1:
			case <-c2:
			case <-c3:
			}
		}
	})
	close(done)
}

func BenchmarkSelectNonblock(b *testing.B) {
	c1, c2, c3, c4 := make(chan int), make(chan int), make(chan int, 1), make(chan int, 1)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			select {
			case <-c1:
			default:
			}
			select {
			case c2 <- 0:
			default:
			}
			select {
			case <-c3:
			default:
			}
			select {
			case c4 <- 0:
			default:
			}
		}
	})
}

func BenchmarkCreateGoroutines(b *testing.B)         { chains(b, 1) }
func BenchmarkCreateGoroutinesParallel(b *testing.B) { chains(b, runtime.GOMAXPROCS(0)) }

// chains has goroutines that each start the next one and end.
func chains(b *testing.B, n int) {
	done := make(chan bool)
	var link func(left int)
	link = func(left int) {
		if left == 0 {
			done <- true
		} else {
			go link(left - 1)
		}
	}
	for range n {
		go link(b.N / n)
	}
	for range n {
		<-done
	}
}

func BenchmarkCreateGoroutinesSingle(b *testing.B) {
	var wg sync.WaitGroup
	wg.Add(b.N)
	for range b.N {
		go func() { wg.Done() }()
	}
	wg.Wait()
}

// BenchmarkPingPongHog has two goroutines play beside one that never waits, on one P.
func BenchmarkPingPongHog(b *testing.B) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	ping, pong, stop := make(chan bool), make(chan bool), make(chan bool)
	var hog sync.WaitGroup
	hog.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
			}
		}
	})
	go func() {
		for v := range ping {
			pong <- v
		}
	}()
	b.ResetTimer()
	for range b.N {
		ping <- true
		<-pong
	}
	b.StopTimer()
	close(ping)
	close(stop)
	hog.Wait()
}

func BenchmarkMutexUncontended(b *testing.B) {
	b.RunParallel(func(pb *testing.PB) {
		var lock struct {
			sync.Mutex
			_ [128]byte
		}
		for pb.Next() {
			lock.Lock()
			lock.Unlock()
		}
	})
}

func BenchmarkMutex(b *testing.B)          { locking(b, 1, false) }
func BenchmarkMutexSlack(b *testing.B)     { locking(b, 10, false) }
func BenchmarkMutexWork(b *testing.B)      { locking(b, 1, true) }
func BenchmarkMutexWorkSlack(b *testing.B) { locking(b, 10, true) }

// locking has n goroutines for each P at one lock, with arithmetic in between or not.
func locking(b *testing.B, n int, working bool) {
	var lock sync.Mutex
	var sink atomic.Uint64 // for the compiler: the work is needed
	b.SetParallelism(n)
	b.RunParallel(func(pb *testing.PB) {
		x := uint64(1)
		for pb.Next() {
			lock.Lock()
			lock.Unlock()
			if working {
				x = work(x)
			}
		}
		sink.Add(x)
	})
}

// BenchmarkMutexSpin has goroutines with much data in their caches, one for each P.
func BenchmarkMutexSpin(b *testing.B) {
	var lock sync.Mutex
	var count int
	b.RunParallel(func(pb *testing.PB) {
		data := make([]uint64, 16<<10)
		for pb.Next() {
			lock.Lock()
			count++
			lock.Unlock()
			touch(data)
		}
	})
	check(count == b.N)
}

// BenchmarkMutexNoSpin has more goroutines than P, which let others run while they work.
func BenchmarkMutexNoSpin(b *testing.B) {
	var lock sync.Mutex
	var count int
	b.SetParallelism(4)
	b.RunParallel(func(pb *testing.PB) {
		data := make([]uint64, 4<<10)
		ch := make(chan bool)
		for i := 0; pb.Next(); i++ {
			if i%4 == 0 {
				lock.Lock()
				count++
				lock.Unlock()
			} else {
				touch(data)
				go func() { ch <- true }()
				<-ch
			}
		}
	})
}

func touch(data []uint64) {
	for i := 0; i < len(data); i += 4 {
		data[i]++
	}
}

func BenchmarkRWMutexUncontended(b *testing.B) {
	b.RunParallel(func(pb *testing.PB) {
		var lock struct {
			sync.RWMutex
			_ [128]byte
		}
		for pb.Next() {
			lock.RLock()
			lock.RLock()
			lock.RUnlock()
			lock.RUnlock()
			lock.Lock()
			lock.Unlock()
		}
	})
}

func BenchmarkRWMutexWrite100(b *testing.B) { reading(b, 100) }
func BenchmarkRWMutexWrite10(b *testing.B)  { reading(b, 10) }

// reading writes once in so many rounds.
func reading(b *testing.B, write int) {
	var lock sync.RWMutex
	b.RunParallel(func(pb *testing.PB) {
		for i := 1; pb.Next(); i++ {
			if i%write == 0 {
				lock.Lock()
				lock.Unlock()
			} else {
				lock.RLock()
				lock.RUnlock()
			}
		}
	})
}

func BenchmarkWaitGroupUncontended(b *testing.B) {
	b.RunParallel(func(pb *testing.PB) {
		var wg struct {
			sync.WaitGroup
			_ [128]byte
		}
		for pb.Next() {
			wg.Add(1)
			wg.Done()
			wg.Wait()
		}
	})
}

func BenchmarkWaitGroupAddDone(b *testing.B) {
	var wg sync.WaitGroup
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			wg.Add(1)
			wg.Done()
		}
	})
}

func BenchmarkWaitGroupWait(b *testing.B) {
	var wg sync.WaitGroup
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			wg.Wait()
		}
	})
}

func BenchmarkWaitGroupActuallyWait(b *testing.B) {
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			var wg sync.WaitGroup
			wg.Add(1)
			go func() { wg.Done() }()
			wg.Wait()
		}
	})
}

func BenchmarkCond1(b *testing.B)  { meeting(b, 1) }
func BenchmarkCond8(b *testing.B)  { meeting(b, 8) }
func BenchmarkCond32(b *testing.B) { meeting(b, 32) }

// meeting has goroutines wait for the last of them, again and again; the first to be done ends it.
func meeting(b *testing.B, waiters int) {
	cond := sync.NewCond(&sync.Mutex{})
	here, over := 0, false
	var wg sync.WaitGroup
	for range waiters + 1 {
		wg.Go(func() {
			cond.L.Lock()
			defer cond.L.Unlock()
			for i := 0; i < b.N && !over; i++ {
				if here++; here > waiters {
					here = 0
					cond.Broadcast()
				} else {
					cond.Wait()
				}
				cond.L.Unlock()
				cond.L.Lock()
			}
			over = true
			cond.Broadcast()
		})
	}
	wg.Wait()
}

func BenchmarkOnce(b *testing.B) {
	var once sync.Once
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			once.Do(func() {})
		}
	})
}

// timing runs a body beside many timers that are far away.
func timing(b *testing.B, body func(*testing.PB)) {
	timers := make([][]*time.Timer, runtime.GOMAXPROCS(0))
	var wg sync.WaitGroup
	for p := range timers {
		wg.Go(func() { timers[p] = farAway(garbage) })
	}
	wg.Wait()
	b.ResetTimer()
	b.RunParallel(body)
	b.StopTimer()
	for _, timers := range timers {
		stop(timers)
	}
}

func farAway(n int) []*time.Timer {
	timers := make([]*time.Timer, n)
	for i := range timers {
		timers[i] = time.AfterFunc(time.Hour, func() {})
	}
	return timers
}

func stop(timers []*time.Timer) {
	for _, timer := range timers {
		timer.Stop()
	}
}

func BenchmarkAfterFunc1000(b *testing.B) {
	timing(b, func(pb *testing.PB) {
		for pb.Next() {
			done := make(chan bool)
			left := crowd
			var next func()
			next = func() {
				if left--; left >= 0 {
					time.AfterFunc(0, next)
				} else {
					done <- true
				}
			}
			time.AfterFunc(0, next)
			<-done
		}
	})
}

func BenchmarkSimultaneousAfterFunc1000(b *testing.B) {
	timing(b, func(pb *testing.PB) {
		for pb.Next() {
			var wg sync.WaitGroup
			wg.Add(crowd)
			for range crowd {
				time.AfterFunc(0, wg.Done)
			}
			wg.Wait()
		}
	})
}

func BenchmarkAfter(b *testing.B) {
	timing(b, func(pb *testing.PB) {
		for pb.Next() {
			<-time.After(1)
		}
	})
}

func BenchmarkStop(b *testing.B) {
	timing(b, func(pb *testing.PB) {
		for pb.Next() {
			time.NewTimer(time.Second).Stop()
		}
	})
}

func BenchmarkStartStop1000(b *testing.B) {
	timing(b, func(pb *testing.PB) {
		for pb.Next() {
			stop(farAway(crowd))
		}
	})
}

func BenchmarkReset(b *testing.B) {
	timing(b, func(pb *testing.PB) {
		timer := time.NewTimer(time.Hour)
		for pb.Next() {
			timer.Reset(time.Hour)
		}
		timer.Stop()
	})
}

func BenchmarkSleep1000(b *testing.B) {
	timing(b, func(pb *testing.PB) {
		for pb.Next() {
			var wg sync.WaitGroup
			wg.Add(crowd)
			for range crowd {
				go func() {
					time.Sleep(1)
					wg.Done()
				}()
			}
			wg.Wait()
		}
	})
}

func BenchmarkTicker(b *testing.B) {
	timing(b, func(pb *testing.PB) {
		ticker := time.NewTicker(1)
		for pb.Next() {
			<-ticker.C
		}
		ticker.Stop()
	})
}

func BenchmarkTickerReset(b *testing.B) {
	timing(b, func(pb *testing.PB) {
		ticker := time.NewTicker(1)
		for pb.Next() {
			ticker.Reset(2)
		}
		ticker.Stop()
	})
}
