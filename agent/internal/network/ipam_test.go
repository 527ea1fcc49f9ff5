package network

import (
	"net/netip"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

// pool is a network of six addresses, of which the bridge has the first, in a state directory of its own.
type pool struct {
	t   *testing.T
	cfg Config
	n   *Network
}

func newPool(t *testing.T) *pool {
	t.Helper()
	p := &pool{t: t, cfg: Config{
		Bridge: "none0", CIDR: "10.77.0.0/29", StateDir: t.TempDir(), SharedDir: "/nonexistent",
	}}
	p.reopen()
	return p
}

func (p *pool) reopen() {
	p.t.Helper()
	n, err := Open(p.t.Context(), p.cfg)
	require.NoError(p.t, err)
	p.n = n
}

func (p *pool) allocate(member, want string) {
	p.t.Helper()
	require.NoError(p.t, p.n.writeRecord(member, record{}))
	ip, err := p.n.allocateAddress(member)
	require.NoError(p.t, err)
	require.Equal(p.t, netip.MustParseAddr(want), ip)
}

func (p *pool) release(member string) {
	p.t.Helper()
	require.NoError(p.t, p.n.releaseAddress(member))
	require.NoError(p.t, os.Remove(p.n.recordPath(member)))
}

func TestAddressesAreGivenInTurnAndLeakedOnesAreFound(t *testing.T) {
	p := newPool(t)
	p.allocate("m1", "10.77.0.2")
	p.allocate("m2", "10.77.0.3")
	p.release("m2")
	p.allocate("m3", "10.77.0.4")
	p.reopen()
	p.allocate("m4", "10.77.0.5")
	p.release("m4")
	p.allocate("m5", "10.77.0.6")
	p.allocate("m6", "10.77.0.3")
	p.allocate("m7", "10.77.0.5")
	_, err := p.n.allocateAddress("m8")
	require.EqualValues(t, "network_full", fault.As(err).Code)

	p.release("m6")
	p.allocate("gone", "10.77.0.3")
	require.NoError(t, os.Remove(p.n.recordPath("gone")))
	p.allocate("m8", "10.77.0.3")
	p.release("m8")
	p.allocate("gone", "10.77.0.3")
	require.NoError(t, os.Remove(p.n.recordPath("gone")))
	p.reopen()
	_, ok := p.n.addressOf("gone")
	require.False(t, ok)
	for member, want := range map[string]string{
		"m1": "10.77.0.2", "m3": "10.77.0.4", "m5": "10.77.0.6", "m7": "10.77.0.5",
	} {
		ip, ok := p.n.addressOf(member)
		require.True(t, ok, member)
		require.Equal(t, want, ip.String())
	}
}

// Law 10: a client that still talks to the last member of a node does not reach the next one.
func TestLaw10TheMemberAfterTheLastOneHasAnotherAddress(t *testing.T) {
	p := newPool(t)
	p.allocate("m1", "10.77.0.2")
	p.release("m1")
	require.NoError(t, p.n.removeLeases())
	p.allocate("m2", "10.77.0.3")
}

// The machine may go down while the file is written, and an administrator may remove it.
func TestALostFileOfAddressesGivesNoAddressTwice(t *testing.T) {
	for name, damage := range map[string]func(path string) error{
		"removed":       os.Remove,
		"cut off":       func(path string) error { return os.WriteFile(path, []byte(`{"last":"10.7`), 0o600) },
		"half replaced": func(path string) error { return os.WriteFile(path+".new", []byte(`{"la`), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			p := newPool(t)
			p.allocate("m1", "10.77.0.2")
			ip := netip.MustParseAddr("10.77.0.2")
			require.NoError(t, p.n.writeRecord("m1", record{BootID: p.n.bootID, Ready: true, IP: ip}))
			require.NoError(t, damage(p.n.leasesPath()))
			p.reopen()
			p.allocate("m2", "10.77.0.3")
		})
	}
}

func TestAMemberThatHasAnAddressKeepsIt(t *testing.T) {
	p := newPool(t)
	p.allocate("m1", "10.77.0.2")
	p.allocate("m1", "10.77.0.2")
	p.allocate("m2", "10.77.0.3")
}

func TestAnAddressThatCannotBeWrittenDownIsNotGiven(t *testing.T) {
	p := newPool(t)
	require.NoError(t, p.n.writeRecord("m1", record{}))
	require.NoError(t, os.Mkdir(p.n.leasesPath()+".new", 0o700))
	_, err := p.n.allocateAddress("m1")
	require.Error(t, err)
	_, ok := p.n.addressOf("m1")
	require.False(t, ok)
	require.NoError(t, os.RemoveAll(p.n.leasesPath()+".new"))
	p.allocate("m1", "10.77.0.2")
}
