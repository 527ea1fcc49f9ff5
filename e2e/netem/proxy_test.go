package netem_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/gpuaas/gpuaas/e2e/netem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	seed = 11
	node = "127.0.0.1"
	// soon bounds what is waited for, silence how long nothing is waited for.
	soon    = 10 * time.Second
	silence = 200 * time.Millisecond
)

// hub answers each packet and each connection with what it got, and notes where packets came from.
type hub struct {
	udp *net.UDPConn
	tcp net.Listener

	mu    sync.Mutex
	got   []uint32
	ports []int
}

func newHub(t *testing.T) *hub {
	t.Helper()
	h := &hub{}
	var err error
	h.udp, err = net.ListenUDP("udp", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	require.NoError(t, err)
	h.tcp, err = net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var running sync.WaitGroup
	running.Go(func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := h.udp.ReadFromUDP(buf)
			if err != nil {
				return
			}
			h.mu.Lock()
			h.got, h.ports = append(h.got, binary.BigEndian.Uint32(buf)), append(h.ports, from.Port)
			h.mu.Unlock()
			_, _ = h.udp.WriteToUDP(buf[:n], from)
		}
	})
	running.Go(func() {
		for {
			c, err := h.tcp.Accept()
			if err != nil {
				return
			}
			running.Go(func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			})
		}
	})
	t.Cleanup(func() {
		_, _ = h.udp.Close(), h.tcp.Close()
		running.Wait()
	})
	return h
}

func (h *hub) packets() (numbers []uint32, ports []int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.got), slices.Clone(h.ports)
}

type fixture struct {
	t   *testing.T
	hub *hub
	p   *netem.Proxy
	l   *netem.Link
}

func newFixture(t *testing.T) *fixture {
	t.Helper()
	h := newHub(t)
	p, err := netem.Start(netem.Config{
		ListenUDP: "127.0.0.1:0", HubUDP: h.udp.LocalAddr().String(), ListenTCP: "127.0.0.1:0", HubTCP: h.tcp.Addr().String(),
		Seed: seed,
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, p.Close()) })
	return &fixture{t, h, p, p.Link(node)}
}

// socket is a port of the node's.
func (f *fixture) socket() net.Conn {
	f.t.Helper()
	c, err := net.Dial("udp", f.p.UDPAddr())
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = c.Close() })
	return c
}

// send sends numbered packets and waits until the proxy has seen each, so that no buffer overflows.
func (f *fixture) send(c net.Conn, n int) {
	f.t.Helper()
	before, _ := f.l.Stats()
	for i := range n {
		_, err := c.Write(binary.BigEndian.AppendUint32(nil, uint32(i)))
		require.NoError(f.t, err)
		f.until(func() bool { now, _ := f.l.Stats(); return now.Came == before.Came+i+1 })
	}
}

func (f *fixture) until(there func() bool) {
	f.t.Helper()
	for deadline := time.Now().Add(soon); !there(); time.Sleep(50 * time.Microsecond) {
		if time.Now().After(deadline) {
			f.t.Fatal("it does not come")
		}
	}
}

// receive reads as many packets as are due, however late they come, and those that come shortly after them.
func (f *fixture) receive(c net.Conn, due int) (numbers []uint32) {
	f.t.Helper()
	buf := make([]byte, 1500)
	for {
		within := soon
		if len(numbers) >= due {
			within = silence
		}
		require.NoError(f.t, c.SetReadDeadline(time.Now().Add(within)))
		_, err := c.Read(buf)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return numbers
		}
		require.NoError(f.t, err)
		numbers = append(numbers, binary.BigEndian.Uint32(buf))
	}
}

func count(n int) (numbers []uint32) {
	for i := range n {
		numbers = append(numbers, uint32(i))
	}
	return numbers
}

func TestPacketsPassUnharmedAndInOrder(t *testing.T) {
	f := newFixture(t)
	c := f.socket()
	f.send(c, 200)
	require.Equal(t, count(200), f.receive(c, 200))
}

func TestStatsCountLostPackets(t *testing.T) {
	f := newFixture(t)
	c := f.socket()
	const sent = 400
	f.l.Set(netem.Conditions{Loss: 0.3}, netem.Conditions{Bursts: netem.InBursts(0.3, 4)})
	f.send(c, sent)
	f.until(func() bool {
		up, down := f.l.Stats()
		arrived, _ := f.hub.packets()
		return len(arrived) == up.Came-up.Lost && down.Came == len(arrived)
	})
	up, down := f.l.Stats()
	back := f.receive(c, down.Came-down.Lost)
	arrived, _ := f.hub.packets()
	require.Equal(t, sent, up.Came)
	require.Len(t, arrived, up.Came-up.Lost)
	require.Equal(t, len(arrived), down.Came)
	require.Len(t, back, down.Came-down.Lost)
	require.InDelta(t, 0.3, float64(up.Lost)/float64(up.Came), 0.1)
	require.Positive(t, down.Lost)
}

func TestJitterReordersAndDuplicateDoubles(t *testing.T) {
	f := newFixture(t)
	c := f.socket()
	f.l.Set(netem.Conditions{Delay: 10 * time.Millisecond, Jitter: 40 * time.Millisecond, Duplicate: 0.2},
		netem.Conditions{})
	f.send(c, 200)
	up, _ := f.l.Stats()
	back := f.receive(c, 200+up.Doubled)
	require.Positive(t, up.Doubled)
	require.Len(t, back, 200+up.Doubled)
	require.False(t, slices.IsSorted(back), "nothing was overtaken")
	slices.Sort(back)
	require.Equal(t, count(200), slices.Compact(back))
}

func TestEachDirectionCanBeCutAlone(t *testing.T) {
	f := newFixture(t)
	c := f.socket()
	cut := netem.Conditions{Cut: true}
	f.l.Set(netem.Conditions{}, cut)
	f.send(c, 10)
	f.until(func() bool { _, down := f.l.Stats(); return down.Lost == 10 })
	require.Empty(t, f.receive(c, 0))
	arrived, _ := f.hub.packets()
	require.Len(t, arrived, 10, "the hub hears the node")
	f.l.Set(cut, netem.Conditions{})
	f.send(c, 10)
	require.Empty(t, f.receive(c, 0))
	arrived, _ = f.hub.packets()
	require.Len(t, arrived, 10, "the hub hears nothing")
	f.l.Set(netem.Conditions{}, netem.Conditions{})
	f.send(c, 10)
	require.Equal(t, count(10), f.receive(c, 10))
}

func TestAnotherNodeHasALinkOfItsOwn(t *testing.T) {
	f := newFixture(t)
	f.p.Link("127.0.0.9").Set(netem.Conditions{Cut: true}, netem.Conditions{Cut: true})
	c := f.socket()
	f.send(c, 10)
	require.Equal(t, count(10), f.receive(c, 10))
}

func TestRebindingShowsTheHubAnotherPortAndAnswersStillArrive(t *testing.T) {
	f := newFixture(t)
	c := f.socket()
	for range 3 {
		f.send(c, 1)
		require.Equal(t, count(1), f.receive(c, 1))
		require.NoError(t, f.l.Rebind())
	}
	_, ports := f.hub.packets()
	slices.Sort(ports)
	require.Len(t, slices.Compact(ports), 3)
	require.Len(t, f.l.Dials(), 1, "the node still uses one port")
}

func TestDialsAreCountedAlsoWhileTheLinkIsCut(t *testing.T) {
	f := newFixture(t)
	cut := netem.Conditions{Cut: true}
	f.l.Set(cut, cut)
	for n := range 3 {
		f.send(f.socket(), 2)
		require.Len(t, f.l.Dials(), n+1)
	}
}

func (f *fixture) connect() net.Conn {
	f.t.Helper()
	c, err := net.Dial("tcp", f.p.TCPAddr())
	require.NoError(f.t, err)
	f.t.Cleanup(func() { _ = c.Close() })
	return c
}

func TestConnectionsCarryEveryByteInOrderThroughALossyLink(t *testing.T) {
	f := newFixture(t)
	bad := netem.Conditions{Loss: 0.1, Jitter: 5 * time.Millisecond, Duplicate: 0.1}
	f.l.Set(bad, bad)
	c := f.connect()
	sent := make([]byte, 1<<20)
	for i := range sent {
		sent[i] = byte(i * 31 >> 3)
	}
	go func() {
		_, _ = c.Write(sent)
		_ = c.(*net.TCPConn).CloseWrite()
	}()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(soon)))
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, sent, got)
	require.Len(t, f.l.Connects(), 1)
}

func TestConnectionsStallWhileTheLinkIsCutAndContinue(t *testing.T) {
	f := newFixture(t)
	cut := netem.Conditions{Cut: true}
	before := f.connect()
	say := func(c net.Conn, word string) {
		_, err := io.WriteString(c, word)
		require.NoError(t, err)
	}
	hear := func(c net.Conn, word string, within time.Duration) error {
		require.NoError(t, c.SetReadDeadline(time.Now().Add(within)))
		got := make([]byte, len(word))
		_, err := io.ReadFull(c, got)
		if err == nil && string(got) != word {
			return fmt.Errorf("got %q", got)
		}
		return err
	}
	say(before, "one")
	require.NoError(t, hear(before, "one", soon))
	f.l.Set(cut, cut)
	during := f.connect()
	say(before, "two")
	say(during, "new")
	require.ErrorIs(t, hear(before, "two", silence), os.ErrDeadlineExceeded)
	require.ErrorIs(t, hear(during, "new", silence), os.ErrDeadlineExceeded)
	f.l.Set(netem.Conditions{}, netem.Conditions{})
	require.NoError(t, hear(before, "two", soon))
	require.NoError(t, hear(during, "new", soon))
}
