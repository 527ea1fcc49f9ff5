package reconcile

import (
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestServiceIsSeenReadyLateByAShareOfItsStartAtMost(t *testing.T) {
	const period = time.Second
	for _, readyAfter := range []time.Duration{
		time.Millisecond, 30 * time.Millisecond, 400 * time.Millisecond,
		3 * time.Second, time.Minute,
	} {
		probes, at := 1, time.Duration(0)
		for at < readyAfter {
			at += untilNextProbe(at, 0, period)
			probes++
		}
		late := at - readyAfter
		require.LessOrEqual(t, late, min(max(readyAfter/16, 5*time.Millisecond), period), "ready after %s", readyAfter)
		require.LessOrEqual(t, probes, 110+int(readyAfter/period), "and is not asked without pause")
	}
}

func TestProbeThatTakesLongIsNotRepeatedWithoutPause(t *testing.T) {
	require.Equal(t, 200*time.Millisecond, untilNextProbe(300*time.Millisecond, 100*time.Millisecond, time.Second))
	require.Equal(t, time.Second, untilNextProbe(0, 2*time.Second, time.Second))
}

func TestAReadyServiceIsProbedAsOftenAsItsManifestSays(t *testing.T) {
	require.Equal(t, time.Second, untilHealthyProbe(time.Millisecond, time.Second))
	require.Equal(t, 3*time.Second, untilHealthyProbe(time.Millisecond, 3*time.Second))
	require.Equal(t, time.Minute, untilHealthyProbe(time.Second, time.Minute))
}

func TestProbingAReadyServiceHasABoundedCost(t *testing.T) {
	require.Equal(t, time.Second, untilHealthyProbe(time.Millisecond, 100*time.Millisecond),
		"once a second is often enough")
	require.Equal(t, 2*time.Second, untilHealthyProbe(100*time.Millisecond, time.Second),
		"a twentieth of the time at most")
	require.Equal(t, 5*time.Second, untilHealthyProbe(2*time.Second, time.Second), "and yet it is probed")
}

func TestPausesOfAnIdleNodeEndTogether(t *testing.T) {
	began := time.Unix(1_800_000_000, 0)
	for _, at := range []time.Duration{0, 3 * time.Millisecond, 130 * time.Millisecond, 249 * time.Millisecond} {
		for _, pause := range []time.Duration{250 * time.Millisecond, time.Second, 5 * time.Second} {
			until := untilSlot(began.Add(at), pause)
			require.Zero(t, began.Add(at+until).UnixMilli()%slot.Milliseconds())
			require.InDelta(t, pause, until, float64(slot/2))
		}
	}
}

// The status says whether an app is up, and an app may answer with more than a probe reads.
func TestALongAnswerIsAnAnswer(t *testing.T) {
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status, _ := strconv.Atoi(r.FormValue("status"))
		w.WriteHeader(status)
		_, _ = w.Write([]byte(strings.Repeat("x", 2*maxProbeBytes))) // in chunks, as its length is not known
	}))
	defer app.Close()
	addr := app.Listener.Addr().String()
	require.NoError(t, probeHTTP(t.Context(), addr, "/?status=200"))
	require.ErrorContains(t, probeHTTP(t.Context(), addr, "/?status=500"), "HTTP status 500")
}
