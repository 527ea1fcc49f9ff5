package network

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/pkg/fault"
)

func TestAddressesAreGivenInTurnAndLeakedOnesAreFound(t *testing.T) {
	cfg := Config{Bridge: "none0", CIDR: "10.77.0.0/29", StateDir: t.TempDir(), SharedDir: "/nonexistent"}
	open := func() *Network {
		n, err := Open(t.Context(), cfg)
		require.NoError(t, err)
		return n
	}
	n := open()
	take := func(member, want string) {
		t.Helper()
		require.NoError(t, n.writeRecord(member, record{}))
		ip, err := n.takeAddress(member)
		require.NoError(t, err)
		require.Equal(t, netip.MustParseAddr(want), ip)
	}
	give := func(member string) {
		t.Helper()
		require.NoError(t, n.freeAddresses(member))
		require.NoError(t, os.Remove(n.recordPath(member)))
	}
	note := func(ip, content string) {
		require.NoError(t, os.WriteFile(filepath.Join(n.addressDir(), ip), []byte(content), 0o600))
	}
	take("m1", "10.77.0.2")
	take("m2", "10.77.0.3")
	give("m2")
	take("m3", "10.77.0.4")
	n = open()
	take("m4", "10.77.0.5")
	give("m4")
	take("m5", "10.77.0.6")
	take("m6", "10.77.0.3")
	take("m7", "10.77.0.5")
	_, err := n.takeAddress("m8")
	require.Equal(t, "network_full", fault.As(err).Code)

	give("m6")
	note("10.77.0.3", "of a member that is gone\r\neth0")
	take("m8", "10.77.0.3")
	give("m8")
	note("10.77.0.3", "") // a crash came between making the file and writing it
	n = open()
	require.NoFileExists(t, filepath.Join(n.addressDir(), "10.77.0.3"))
	for _, member := range []string{"m1", "m3", "m5", "m7"} {
		mine, err := n.addressesOf(member)
		require.NoError(t, err)
		require.Len(t, mine, 1, member)
	}
}
