package reconcile_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/gpuaas/gpuaas/agent"
	"github.com/gpuaas/gpuaas/agent/internal/state"
	"github.com/gpuaas/gpuaas/agent/policy"
	"github.com/gpuaas/gpuaas/protocol"
)

func TestWorkloadRunsIsMeasuredAndLeavesNothing(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{"greeting":"Good day"}`)
	f.push(w)
	ready := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.Equal(t, "Good day\n", get(t, url(ready, "/")))
	require.Equal(t, "127.0.0.1", ready.GetEndpoints()[0].GetHost())
	require.Equal(t, "corr-1", ready.GetCorrelationId())
	require.NotNil(t, ready.GetReadyAt())
	c := f.container(w.GetId())

	f.push()
	removed := f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	require.True(t, removed.GetRemoval().Complete())
	left, err := f.rt.Leftovers(f.ctx(), w.GetId())
	require.NoError(t, err)
	require.Empty(t, left)
	attached, err := f.nw.List()
	require.NoError(t, err)
	require.Empty(t, attached)
	require.Empty(t, f.store.Runs())
	require.Empty(t, f.store.Leases())

	member := f.store.Members()[w.GetId()]
	seconds, final := f.measured(w.GetId())
	require.True(t, final)
	require.InDelta(t, member.ExitedAt.Sub(c.StartedAt).Seconds(), seconds.Seconds(), 0.1,
		"usage is the container's own running time")
	require.Equal(t, f.store.Spool().LastSequence, removed.GetRemoval().GetLastUsageSequence())
}

func TestLaw04RestartOfTheAgentLeavesTheProcessAlone(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	f.push(w)
	before := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	pid := f.container(w.GetId()).PID
	f.restart()
	after := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.Equal(t, pid, f.container(w.GetId()).PID)
	require.True(t, proto.Equal(before.GetReadyAt(), after.GetReadyAt()), "it was ready all the time")
	require.True(t, proto.Equal(before.GetEndpoints()[0], after.GetEndpoints()[0]))
	require.Zero(t, after.GetRestarts())
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	f.measured(w.GetId())
}

func TestLaw10AFirewallTableThatSomeoneRemovesIsThereAgainWithinAResync(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	f.push(w)
	at := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY).GetEndpoints()[0]
	out, err := exec.Command("nft", "delete", "table", "inet", "gpuaas_"+f.nwCfg.Bridge).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Eventually(t, func() bool {
		c, err := net.DialTimeout("tcp", fmt.Sprintf("%s:%d", at.GetHost(), at.GetPort()), time.Second)
		if err != nil {
			return false
		}
		return c.Close() == nil
	}, 30*time.Second, 10*time.Millisecond, "the published port, and with it the isolation rules")
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
}

func TestLaw15WhatTheOwnerRefusesStopsAndIsSigned(t *testing.T) {
	f := newFixture(t)
	w, other := f.hub.workload(`{}`), f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	f.hub.away.Store(true)
	f.owner.Store(&policy.Policy{Closed: true})
	f.push(w, other)
	for _, member := range []string{w.GetId(), other.GetId()} {
		s := f.untilStatus(member, protocol.WorkloadStatus_FAILED)
		require.Equal(t, protocol.WorkloadStatus_OWNER_REFUSED, s.GetReason())
		v, err := protocol.VerifyOwnerRefusal(s, nodeID, f.hub.node.Public().(ed25519.PublicKey))
		require.NoError(t, err)
		require.Equal(t, s.GetDetail(), v.Message().GetRule())
	}
	require.Eventually(t, func() bool {
		all, err := f.rt.List(f.ctx())
		return err == nil && len(all) == 0
	}, 30*time.Second, 10*time.Millisecond, "nothing runs")
	f.owner.Store(&policy.Policy{})
	require.Nil(t, f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY).GetOwnerRefusal())
}

// A machine that isolates containers weakly serves the org of its oldest member, and another one once the owner shares
// it.
func TestLaw10AWeaklyIsolatedNodeRunsOneOrg(t *testing.T) {
	f := newFixture(t)
	f.weak = []string{protocol.ConditionRuncVulnerable}
	f.restart()
	w, other := f.hub.workload(`{}`), f.hub.workload(`{}`)
	other.OrgSlug = "other"
	f.push(other, w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	refused := f.untilStatus(other.GetId(), protocol.WorkloadStatus_FAILED)
	require.Equal(t, protocol.WorkloadStatus_OWNER_REFUSED, refused.GetReason())
	require.Contains(t, refused.GetDetail(), protocol.ConditionRuncVulnerable)
	require.Contains(t, f.re.Report().Conditions, protocol.ConditionRuncVulnerable)
	f.owner.Store(&policy.Policy{ShareWeakIsolation: true})
	f.untilStatus(other.GetId(), protocol.WorkloadStatus_READY)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.Contains(t, f.re.Report().Conditions, protocol.ConditionWeakIsolationShared)
}

func TestLaw01WhatThePublisherDidNotSignIsNotStarted(t *testing.T) {
	f := newFixture(t)
	good := f.hub.workload(`{}`)
	other := f.hub.workload(`{}`)
	other.Services[0].Command = []string{"/app", "--mine-bitcoin"}
	unsigned := f.hub.workload(`{}`)
	unsigned.Manifest.Signatures[0].Signature[0] ^= 1
	lacking := f.hub.workload(`{}`)
	lacking.Features = append(lacking.Features, "time_travel")
	f.push(good, other, unsigned, lacking)
	f.untilStatus(good.GetId(), protocol.WorkloadStatus_READY)
	for w, reason := range map[*protocol.Workload]protocol.WorkloadStatus_Reason{
		other:    protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED,
		unsigned: protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED,
		lacking:  protocol.WorkloadStatus_FEATURE_MISSING,
	} {
		s := f.untilStatus(w.GetId(), protocol.WorkloadStatus_FAILED)
		require.Equal(t, reason, s.GetReason())
		require.NotEmpty(t, s.GetDetail())
	}
	all, err := f.rt.List(f.ctx())
	require.NoError(t, err)
	require.Len(t, all, 1)
}

func TestCrashIsRestartedUnderTheSamePortAndCounted(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	f.push(w)
	first := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	_, err := http.Post(url(first, "/exit?code=7"), "", nil)
	_ = err // it may die before it answers
	again := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetStatus() == protocol.WorkloadStatus_READY && s.GetRestarts() == 1
	})
	require.EqualValues(t, 7, again.GetExitCode())
	require.Equal(t, first.GetEndpoints()[0].GetPort(), again.GetEndpoints()[0].GetPort())
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	_, final := f.measured(w.GetId())
	require.True(t, final)
}

func TestUpgradeReplacesTheContainerAndStopKeepsThePort(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{"greeting":"one"}`)
	f.push(w)
	one := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	next := f.hub.workload(`{"greeting":"two"}`)
	next.Id, next.InstanceId, next.Revision = w.GetId(), w.GetInstanceId(), 2
	f.push(next)
	two := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetStatus() == protocol.WorkloadStatus_READY && s.GetRevision() == 2
	})
	require.Equal(t, "two\n", get(t, url(two, "/")))
	require.Equal(t, one.GetEndpoints()[0].GetPort(), two.GetEndpoints()[0].GetPort())
	require.Zero(t, two.GetRestarts(), "a replacement is no failure")

	next.Stopped, next.Revision = true, 3
	f.push(next)
	stopped := f.untilStatus(w.GetId(), protocol.WorkloadStatus_STOPPED)
	require.Equal(t, two.GetEndpoints()[0].GetPort(), stopped.GetEndpoints()[0].GetPort())
	all, err := f.rt.List(f.ctx())
	require.NoError(t, err)
	require.Empty(t, all)
}

// shown is what the app says of its config: the one that it has loaded and the one that lies in its file.
type shown struct{ Loaded, File string }

func configOf(t *testing.T, s *protocol.WorkloadStatus) (got shown) {
	t.Helper()
	require.NoError(t, json.Unmarshal([]byte(get(t, url(s, "/config"))), &got))
	return got
}

func TestAChangedConfigReachesTheAppAsItsManifestSays(t *testing.T) {
	const old, changed = `{"motto":"old"}`, `{"motto":"new"}`
	for onChange, want := range map[string]struct {
		loaded   string
		replaced bool
	}{
		"":        {changed, false}, // the manifest's own: SIGHUP
		"none":    {old, false},
		"restart": {changed, true},
	} {
		t.Run(onChange, func(t *testing.T) {
			f := newFixture(t)
			f.hub.onChange, f.hub.configJSON = onChange, old
			w := f.hub.workload(`{}`)
			f.push(w)
			before := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
			require.Equal(t, shown{Loaded: old, File: old}, configOf(t, before))
			pid := f.container(w.GetId()).PID

			sum := sha256.Sum256([]byte(changed))
			next := proto.CloneOf(w)
			next.Services[0].Config.Json = changed
			f.push(next)
			after := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool {
				return s.GetStatus() == protocol.WorkloadStatus_READY && bytes.Equal(s.GetConfigSha256(), sum[:])
			})
			require.JSONEq(t, changed, configOf(t, after).File)
			require.Eventually(t, func() bool { return configOf(t, after).Loaded == want.loaded }, time.Minute,
				10*time.Millisecond, "a signal arrives when the app is scheduled")
			require.Equal(t, want.replaced, f.container(w.GetId()).PID != pid)
			require.Zero(t, after.GetRestarts(), "a new config is no failure")

			f.restart()
			f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
			require.JSONEq(t, changed, configOf(t, after).File, "an agent's restart leaves it")
			if want.replaced {
				return
			}
			forged := proto.CloneOf(next)
			forged.Services[0].Config.Json = `{"motto":7}`
			f.push(forged)
			refused := f.until(w.GetId(), func(s *protocol.WorkloadStatus) bool { return s.GetReason() != 0 })
			require.Equal(t, protocol.WorkloadStatus_MANIFEST_NOT_ADMITTED, refused.GetReason())
			require.JSONEq(t, changed, configOf(t, after).File, "a config that breaks the schema reaches no app")
		})
	}
}

func TestAppThatIsNotReadyInTimeFails(t *testing.T) {
	f := newFixture(t)
	f.hub.readyWithin = "1"
	w := f.hub.workload(`{"ready_after_millis":3600000}`)
	f.push(w)
	s := f.untilStatus(w.GetId(), protocol.WorkloadStatus_FAILED)
	require.Equal(t, protocol.WorkloadStatus_READINESS_TIMEOUT, s.GetReason())
	require.NotNil(t, s.GetStartedAt())
	require.GreaterOrEqual(t, f.clock.Now().Sub(s.GetStartedAt().AsTime()), time.Second, "it had its time")
}

func TestMissingDocumentIsFetchedAndOneSlowPullDelaysNoOther(t *testing.T) {
	f := newFixture(t)
	f.hub.withheld = true
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)

	// An image that the registry does not have: another workload starts meanwhile, and the first can be taken away.
	f.hub.withheld = false
	m := "sha256:" + strings.Repeat("ab", 32)
	repository, _, _ := strings.Cut(f.hub.image, "@")
	good := f.hub.image
	f.hub.image = repository + "@" + m
	slow := f.hub.workload(`{}`)
	f.hub.image = good
	second := f.hub.workload(`{}`)
	f.push(w, slow, second)
	f.untilStatus(second.GetId(), protocol.WorkloadStatus_READY)
	s := f.until(slow.GetId(), func(s *protocol.WorkloadStatus) bool {
		return s.GetReason() == protocol.WorkloadStatus_IMAGE_PULL_FAILED
	})
	require.Equal(t, protocol.WorkloadStatus_FAILED, s.GetStatus(), "no other try can bring it")
	f.push(w, second)
	f.untilStatus(slow.GetId(), protocol.WorkloadStatus_REMOVED)
}

func TestWithoutAHubAPullWaitsAndIsNoFailure(t *testing.T) {
	f := newFixture(t)
	f.hub.away.Store(true)
	w := f.hub.workload(`{}`)
	f.push(w)
	require.Eventually(t, func() bool { return f.hub.pulls.Load() > 0 }, 30*time.Second, time.Millisecond)
	require.Zero(t, f.store.Members()[w.GetId()].Services["main"].Failures)
	f.hub.away.Store(false)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
}

// A long pull outlives its first credential.
func TestAPullGoesOnWithARenewedCredential(t *testing.T) {
	f := newFixture(t)
	f.hub.renewed.Store(true)
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.Zero(t, f.store.Members()[w.GetId()].Services["main"].Failures)
}

func TestARegistryThatComesBackIsPulledFrom(t *testing.T) {
	f := newFixture(t)
	f.hub.registryDown.Store(true)
	w := f.hub.workload(`{}`)
	f.push(w)
	until := func(condition func(*protocol.WorkloadStatus) bool) {
		t.Helper()
		require.Eventually(t, func() bool {
			if m := f.store.Members()[w.GetId()].Services["main"]; !m.RetryAt.IsZero() {
				// The pause before the next try is over.
				require.NoError(t, f.store.UpdateMember(w.GetId(), func(m *state.Member) {
					service := m.Services["main"]
					service.RetryAt = time.Time{}
					m.Services = map[string]agent.ServiceRecord{"main": service}
				}))
			}
			for _, s := range f.re.Report().Workloads {
				require.NotEqual(t, protocol.WorkloadStatus_FAILED, s.GetStatus(), s.GetReason())
				if condition(s) {
					return true
				}
			}
			return false
		}, 90*time.Second, 10*time.Millisecond)
	}
	until(func(s *protocol.WorkloadStatus) bool {
		return s.GetReason() == protocol.WorkloadStatus_IMAGE_PULL_FAILED &&
			f.store.Members()[w.GetId()].Services["main"].Failures > agent.GiveUpAfter+1
	})
	f.hub.registryDown.Store(false)
	until(func(s *protocol.WorkloadStatus) bool { return s.GetStatus() == protocol.WorkloadStatus_READY })
}

func TestContainersOfAnotherLifeAreTakenAway(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	f.stop()
	require.NoError(t, os.RemoveAll(f.dir+"/state"))
	f.start()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_STARTING) // nothing says yet that it is not wanted any more
	f.container(w.GetId())
	f.push()
	removed := f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	require.True(t, removed.GetRemoval().Complete())
	_, final := f.measured(w.GetId())
	require.True(t, final)
}

// A node that has lost its store keeps what runs as it is, with its ports, once it has the state again.
func TestLaw04AContainerOfAnotherLifeKeepsItsNetwork(t *testing.T) {
	f := newFixture(t)
	other, w := f.hub.workload(`{}`), f.hub.workload(`{}`)
	f.push(other)
	f.untilStatus(other.GetId(), protocol.WorkloadStatus_READY)
	f.push(other, w)
	before := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	pid := f.container(w.GetId()).PID
	f.push(w)
	f.untilStatus(other.GetId(), protocol.WorkloadStatus_REMOVED) // the port that the node chose first is free
	f.stop()
	require.NoError(t, os.RemoveAll(f.dir+"/state"))
	f.start()
	f.push(w)
	again := f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	require.True(t, proto.Equal(before.GetEndpoints()[0], again.GetEndpoints()[0]), "under the same port")
	require.Equal(t, pid, f.container(w.GetId()).PID)
	get(t, url(again, "/"))
}

func TestLaw03AnExpiredTrustBundleIsAConditionAndStopsNothing(t *testing.T) {
	f := newFixture(t)
	w := f.hub.workload(`{}`)
	f.push(w)
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_READY)
	pid := f.container(w.GetId()).PID
	require.NotContains(t, f.re.Report().Conditions, "trust_bundle_expired")

	m := f.hub.bundle.Message()
	m.Version, m.ExpiresAt = 2, timestamppb.New(time.Now().Add(-time.Hour))
	env, err := protocol.SignMessage(protocol.PayloadBundle, m, protocol.NewEd25519Signer(f.hub.root))
	require.NoError(t, err)
	require.NoError(t, f.store.AcceptBundle(env), "an expired bundle is better than an older one")
	f.hub.bundle = f.store.Bundle()
	changed := f.re.Subscribe()
	for bound := time.After(time.Minute); !slices.Contains(f.re.Report().Conditions, "trust_bundle_expired"); {
		select {
		case <-changed:
		case <-bound:
			t.Fatal("nobody notices that the trust bundle has expired")
		}
	}
	other := f.hub.workload(`{}`)
	f.push(w, other)
	f.untilStatus(other.GetId(), protocol.WorkloadStatus_READY)
	require.Equal(t, pid, f.container(w.GetId()).PID)
	f.push()
	f.untilStatus(w.GetId(), protocol.WorkloadStatus_REMOVED)
	f.untilStatus(other.GetId(), protocol.WorkloadStatus_REMOVED)
}

// TestDocumentThatArrivesDuringAPassIsNotRefused accepts state after state during a pass: to the hub a
// refusal would be the end of the instance.
func TestDocumentThatArrivesDuringAPassIsNotRefused(t *testing.T) {
	f := newFixture(t)
	changed, done := f.re.Subscribe(), make(chan struct{})
	refused := make(chan *protocol.WorkloadStatus, 1)
	go func() {
		defer close(refused)
		for {
			for _, w := range f.re.Report().Workloads {
				if w.GetStatus() == protocol.WorkloadStatus_FAILED {
					refused <- w
					return
				}
			}
			select {
			case <-changed:
			case <-done:
				return
			}
		}
	}()
	var all []*protocol.Workload
	for range 60 {
		all = append(all, f.hub.workload(`{}`))
		v, parts := f.hub.desired(all...)
		require.NoError(t, f.store.AcceptState(v, parts))
	}
	f.untilStatus(all[len(all)-1].GetId(), protocol.WorkloadStatus_PENDING)
	close(done)
	require.Nil(t, <-refused)
}
