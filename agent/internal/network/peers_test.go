package network_test

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/agent/internal/network"
)

// meet requires that all of these reach each other, and none of the strangers.
func meet(t *testing.T, services, strangers []network.Attachment) {
	t.Helper()
	for _, from := range services {
		for _, to := range services {
			_, err := call(t, from.NetNSPath, to.IP+":8080", reachable)
			require.NoError(t, err, "%s to its peer %s", from.IP, to.IP)
		}
		for _, stranger := range strangers {
			_, err := call(t, from.NetNSPath, stranger.IP+":8080", unreachable)
			require.Error(t, err, "%s to %s", from.IP, stranger.IP)
			_, err = call(t, stranger.NetNSPath, from.IP+":8080", unreachable)
			require.Error(t, err, "%s to %s", stranger.IP, from.IP)
		}
	}
}

func TestLaw10OnlyTheServicesOfAMemberReachEachOther(t *testing.T) {
	f := newFixture(t)
	var first, second []network.Attachment
	for i, service := range []string{"db", "server", "sidecar"} {
		first = append(first, f.setup(network.ID("m1", service), tcp(uint16(21001+i), 8080)))
	}
	for _, service := range []string{"db", "server"} {
		second = append(second, f.setup(network.ID("m2", service)))
	}
	for _, a := range append(first, second...) {
		serve(t, a.NetNSPath, ":8080")
	}
	meet(t, first, second)
	meet(t, second, nil)
	for port := range 3 {
		_, err := call(t, "", fmt.Sprintf("127.0.0.1:%d", 21001+port), reachable)
		require.NoError(t, err, "each service may publish ports")
	}
	peers := "inet gpuaas_" + f.cfg.Bridge + " peers"
	for name, script := range map[string]string{
		"a restart":  "true",
		"the table":  "nft delete table inet gpuaas_" + f.cfg.Bridge,
		"the peers":  "nft flush set " + peers,
		"a stranger": fmt.Sprintf("nft add element %s '{ %s . %s }'", peers, first[0].IP, second[0].IP),
	} {
		sh(t, script)
		if name == "a restart" {
			f.n = f.open()
		}
		_, err := f.n.EnsureRules(ctxOf(t))
		require.NoError(t, err)
		meet(t, first[:2], second[:1])
	}

	// A service that goes takes its ways with it; the next owner of its address begins with none.
	require.NoError(t, f.n.Remove(ctxOf(t), network.ID("m1", "db")))
	require.NotContains(t, sh(t, "nft list set "+peers), first[0].IP)
	meet(t, first[1:], second[:1])
	left, err := f.n.Leftovers(ctxOf(t), "m1")
	require.NoError(t, err)
	require.NotEmpty(t, left)
	require.NoError(t, f.n.RemoveMember(ctxOf(t), "m1"))
	left, err = f.n.Leftovers(ctxOf(t), "m1")
	require.NoError(t, err)
	require.Empty(t, left)
	meet(t, second, nil)
	all, err := f.n.List()
	require.NoError(t, err)
	require.Equal(t, []string{"m2@db", "m2@server"}, all)
}

// What the next owner of the address sends would pass as an answer to the peer that has talked to the last one.
func TestLaw10ThePeersOfAServiceThatIsGoneHaveNoFlowsToItsAddress(t *testing.T) {
	f := newFixture(t)
	gone, stays := f.setup(network.ID("m1", "db")), f.setup(network.ID("m1", "server"))
	openFlows(t, stays.NetNSPath, stays.IP, gone.IP)
	openFlows(t, stays.NetNSPath, stays.IP, outsideIP)
	to := func(ip string) string { return "src=" + stays.IP + " dst=" + ip + " " }
	require.NoError(t, f.n.Remove(ctxOf(t), network.ID("m1", "db")))
	table := sh(t, "cat /proc/net/nf_conntrack")
	require.NotContains(t, table, to(gone.IP))
	require.Contains(t, table, to(outsideIP), "its others stay")
}

// The next members with these addresses would reach each other.
func TestAWayBetweenAddressesThatNobodyHasIsRemoved(t *testing.T) {
	f := newFixture(t)
	a := f.setup(network.ID("m1", "app"))
	peers := "inet gpuaas_" + f.cfg.Bridge + " peers"
	free := strings.TrimSuffix(f.cfg.CIDR, "0/24")
	for name, way := range map[string][2]string{
		"between two that nobody has": {free + "201", free + "202"},
		"to one that nobody has":      {a.IP, free + "201"},
		"from one that nobody has":    {free + "201", a.IP},
	} {
		sh(t, fmt.Sprintf("nft add element %s '{ %s . %s }'", peers, way[0], way[1]))
		restored, err := f.n.EnsureRules(ctxOf(t))
		require.NoError(t, err)
		require.True(t, restored, name)
		require.NotContains(t, sh(t, "nft list set "+peers), free+"201", name)
	}
}

func TestServicesThatAreAttachedAtOnceReachEachOther(t *testing.T) {
	f := newFixture(t)
	const services = 6
	all, errs := make([]network.Attachment, services), make(chan error, services)
	for i := range services {
		go func() {
			var err error
			all[i], err = f.n.Setup(ctxOf(t), network.ID("m1", fmt.Sprint("s", i)), nil, nil)
			errs <- err
		}()
	}
	for range services {
		require.NoError(t, <-errs)
	}
	for _, a := range all {
		serve(t, a.NetNSPath, ":8080")
	}
	meet(t, all, nil)
}

// A service's attachment that was cut short is made anew or removed; its peers stay as they are.
func TestCrashOfOneServicesAttachmentLeavesItsPeers(t *testing.T) {
	f := newFixture(t)
	server, db := f.setup(network.ID("m1", "server")), f.setup(network.ID("m1", "db"))
	serve(t, server.NetNSPath, ":8080")
	path := f.cfg.StateDir + "/members/m1@db.json"
	require.NoError(t, os.WriteFile(path, unready(t, path), 0o600))
	require.NoError(t, os.Remove(f.cfg.StateDir+"/addresses.json"))
	f.n = f.open()
	require.Equal(t, server, f.setup(network.ID("m1", "server")))
	again := f.setup(network.ID("m1", "db"))
	serve(t, again.NetNSPath, ":8080")
	meet(t, []network.Attachment{server, again}, nil)
	require.Equal(t, 2, strings.Count(sh(t, "nft -a list set inet gpuaas_"+f.cfg.Bridge+" peers"), " . 10.")-strings.Count(
		db.IP, again.IP+"x"), "only the ways between the two")
	require.NoError(t, f.n.RemoveMember(ctxOf(t), "m1"))
	left, err := f.n.Leftovers(ctxOf(t), "m1")
	require.NoError(t, err)
	require.Empty(t, left)
	require.NoError(t, filepath.WalkDir(f.cfg.StateDir, func(path string, d fs.DirEntry, err error) error {
		require.False(t, err == nil && strings.Contains(path, "m1"), path)
		return err
	}))
}
