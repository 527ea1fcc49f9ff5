package httpapi

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/gpuaas/gpuaas/hub/internal/iam"
	"github.com/gpuaas/gpuaas/hub/internal/principal"
	"github.com/gpuaas/gpuaas/protocol"
)

// status makes the request and gives the status of its answer alone.
func (d *testAPI) status(t *testing.T, a ask) int {
	t.Helper()
	res := d.do(t, a)
	require.NoError(t, res.Body.Close())
	return res.StatusCode
}

func bearer(token string) http.Header { return http.Header{"Authorization": {"Bearer " + token}} }

// TestAUsedUpBudgetIsNotForgottenForOthers floods a budget with as many keys as its total admits: memory stays bounded,
// and a key that has used up its budget gets no more than its rate.
func TestAUsedUpBudgetIsNotForgottenForOthers(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	const capacity = 200 + 100*10 // what the total admits while a bucket fills up
	total := newBudget("total", 100, 200, nil)
	b := &budgets{}
	keys := newBudget("key", 1, 10, total)
	spend := func(key string) error { return b.spend([]charge{{keys, key}, {total, ""}}, now) }
	for range 10 {
		require.NoError(t, spend("attacker"))
	}
	require.Error(t, spend("attacker"))
	admitted := 0
	for second := range 60 {
		now = now.Add(time.Second)
		if second < 5 {
			require.NoError(t, spend("attacker"), "its rate")
			require.Error(t, spend("attacker"), "not more")
		}
		for n := 0; spend(fmt.Sprintf("%d/%d", second, n)) == nil; n++ {
			admitted++
		}
		require.LessOrEqual(t, keys.buckets.Len(), capacity)
	}
	require.Greater(t, admitted, 2*capacity, "enough keys to be forgotten")
}

func TestServiceAccountsOfOneOrgTogetherGetNoMoreThanTheOrgsRate(t *testing.T) {
	d := newTestAPI(t, stubServer{}, func(c *Config) { c.RequestsPerSecond, c.Burst = 1, 10 })
	d.known = map[string]iam.Principal{"other": {Type: principal.ServiceAccount, ID: "other", OrgID: "org-2"}}
	for n := range 30 {
		d.known[strconv.Itoa(n)] = iam.Principal{Type: principal.ServiceAccount, ID: strconv.Itoa(n), OrgID: "org-1"}
	}
	granted, refused := 0, ""
	for range 10 {
		for n := range 30 {
			a := getOrgs()
			a.header = bearer(strconv.Itoa(n))
			res := d.do(t, a)
			if res.StatusCode == http.StatusOK {
				granted++
				require.NoError(t, res.Body.Close())
				continue
			}
			refused = problem(t, res, 429).Errors[0].Pointer
		}
	}
	require.Equal(t, orgShare*10, granted)
	require.Equal(t, "budget/org", refused)
	a := getOrgs()
	a.header = bearer("other")
	require.Equal(t, http.StatusOK, d.status(t, a), "another org has its own")
}

func TestAFloodWithAGoodCredentialIsRefusedBeforeTheDatabaseIsAsked(t *testing.T) {
	d := newTestAPI(t, stubServer{}, func(c *Config) { c.RequestsPerSecond, c.Burst = 1, 5 })
	for range 50 {
		d.status(t, getOrgs())
	}
	require.Equal(t, 5, d.lookups)
}

// A credential that was good and is refused now is charged to the address that sends it, as any other guess is.
func TestAFloodWithARevokedCredentialIsRefusedBeforeTheDatabaseIsAsked(t *testing.T) {
	d := newTestAPI(t, stubServer{})
	d.known = map[string]iam.Principal{"once": {Type: principal.User, ID: "once", OrgID: "org-1"}}
	a := getOrgs()
	a.header = bearer("once")
	require.Equal(t, http.StatusOK, d.status(t, a))
	d.known = nil
	for range visitorsBurst {
		require.Equal(t, http.StatusUnauthorized, d.status(t, a))
	}
	for range 10 {
		require.Equal(t, http.StatusTooManyRequests, d.status(t, a))
	}
	require.Equal(t, 1+visitorsBurst, d.lookups, "over the rate, the database is not asked")
}

func TestAnonymousRefusalsAreSampledInTheAuditTrail(t *testing.T) {
	d := newTestAPI(t, stubServer{})
	refuse := func(times int) {
		for range times {
			a := getOrgs()
			a.header = bearer("wrong")
			d.status(t, a)
			d.now = d.now.Add(50 * time.Millisecond)
		}
	}
	refuse(1000)
	require.Len(t, d.audits, 1)
	d.now = d.now.Add(time.Minute)
	refuse(1)
	require.Len(t, d.audits, 2)
	require.EqualValues(t, 999, d.audits[1].Unrecorded)

	d.audits = nil
	for n := range 10 * anonymousRowsBurst {
		a := getOrgs()
		a.header, a.address = bearer("wrong"), fmt.Sprintf("10.%d.%d.1", n/256, n%256)
		d.status(t, a)
	}
	require.LessOrEqual(t, len(d.audits), anonymousRowsBurst, "from all addresses together")
}

func TestPathsOfNoOperationHaveABudget(t *testing.T) {
	for _, a := range []ask{
		{method: http.MethodGet, path: "/nothing"},
		{method: http.MethodDelete, path: "/api/v1/orgs"},
		{method: http.MethodGet, path: "/openapi.yaml"},
	} {
		d := newTestAPI(t, struct{ StrictServerInterface }{&Server{}})
		for range visitorsBurst {
			require.NotEqual(t, http.StatusTooManyRequests, d.status(t, a))
		}
		require.Equal(t, http.StatusTooManyRequests, d.status(t, a), a.path)
		a.address = "198.51.100.1"
		require.NotEqual(t, http.StatusTooManyRequests, d.status(t, a), a.path)
	}
}

func TestTheRegistryHasBudgetsByTokenAndByAddress(t *testing.T) {
	served := 0
	d := newTestAPI(t, stubServer{}, func(c *Config) {
		c.RequestsPerSecond, c.Burst = 1, visitorsBurst+10
		c.Registry = http.HandlerFunc(func(http.ResponseWriter, *http.Request) { served++ })
		c.RegistryCaller = func(r *http.Request) (string, string) { return r.Header.Get("Authorization"), "" }
	})
	flood := func(path, token string) int {
		served = 0
		for range 2 * visitorsBurst {
			d.status(t, ask{method: http.MethodGet, path: path, header: http.Header{"Authorization": {token}}})
		}
		return served
	}
	require.Equal(t, visitorsBurst, flood("/v2/token", ""))
	require.Zero(t, flood("/v2/a/b/manifests/x", ""), "the same address")
	require.Equal(t, visitorsBurst+10, flood("/v2/a/b/manifests/x", "one"))
	require.Equal(t, visitorsBurst+10, flood("/v2/a/b/manifests/x", "two"))
	res := d.do(t, ask{method: http.MethodGet, path: "/v2/", header: http.Header{"Authorization": {"two"}}})
	require.NoError(t, res.Body.Close())
	require.Equal(t, "1", res.Header.Get("Retry-After"))
}

// transfers stands for a registry that reads each body to its end and answers a GET with 400 bytes.
type transfers struct{ read, served int }

func (x *transfers) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n, _ := io.Copy(io.Discard, r.Body)
	x.read += int(n)
	x.served++
	if r.Method == http.MethodGet {
		_, _ = w.Write(make([]byte, 400))
	}
}

// newTransferAPI serves it; a token is ORG/SUBJECT. Of bytes, a caller has 1,000, and 10 a second.
func newTransferAPI(t *testing.T) (*testAPI, *transfers) {
	t.Helper()
	x := &transfers{}
	return newTestAPI(t, stubServer{}, func(c *Config) {
		c.Registry, c.RegistryBytesPerSecond, c.RegistryBurstBytes = x, 10, 1000
		c.RegistryCaller = func(r *http.Request) (string, string) {
			org, subject, _ := strings.Cut(r.Header.Get("Authorization"), "/")
			return subject, org
		}
	}), x
}

// move asks for a transfer and returns the status, the message of a refusal and Retry-After.
func (d *testAPI) move(r *http.Request) (status int, message, retryAfter string) {
	w := httptest.NewRecorder()
	d.ServeHTTP(w, r)
	var refusal struct {
		Errors []struct{ Message string } `json:"errors"`
	}
	if json.Unmarshal(w.Body.Bytes(), &refusal) == nil && len(refusal.Errors) > 0 {
		message = refusal.Errors[0].Message
	}
	return w.Code, message, w.Header().Get("Retry-After")
}

func upload(token string, body io.Reader, length int64) *http.Request {
	r := httptest.NewRequest(http.MethodPut, "/v2/a/b/blobs/uploads/x", body)
	r.ContentLength = length
	r.Header.Set("Authorization", token)
	return r
}

func download(token string) *http.Request {
	r := httptest.NewRequest(http.MethodGet, "/v2/a/b/blobs/x", nil)
	r.Header.Set("Authorization", token)
	return r
}

func TestRegistryTransfersHaveABudgetOfBytes(t *testing.T) {
	send := func(n int) (io.Reader, int64) { return bytes.NewReader(make([]byte, n)), int64(n) }
	t.Run("an upload that is too long is refused before its body is read", func(t *testing.T) {
		d, x := newTransferAPI(t)
		body, length := send(600)
		status, _, _ := d.move(upload("acme/a", body, length))
		require.Equal(t, http.StatusOK, status)
		body, length = send(600)
		status, message, after := d.move(upload("acme/a", body, length))
		require.Equal(t, http.StatusTooManyRequests, status)
		require.Contains(t, message, "caller_bytes")
		require.Equal(t, "20", after, "of 400 that are left, at 10 a second")
		require.Equal(t, 600, x.read)
		require.Equal(t, 1, x.served)
		body, length = send(400)
		status, _, _ = d.move(upload("acme/b", body, length))
		require.Equal(t, http.StatusOK, status, "another caller has its own")
		d.now = d.now.Add(20 * time.Second)
		body, length = send(600)
		status, _, _ = d.move(upload("acme/a", body, length))
		require.Equal(t, http.StatusOK, status)
	})
	t.Run("what nobody knew the length of is owed", func(t *testing.T) {
		for name, ask := range map[string]func() *http.Request{
			"upload":   func() *http.Request { return upload("acme/a", bytes.NewReader(make([]byte, 400)), -1) },
			"download": func() *http.Request { return download("acme/a") },
		} {
			d, _ := newTransferAPI(t)
			for range 3 {
				status, _, _ := d.move(ask())
				require.Equal(t, http.StatusOK, status, name)
			}
			status, message, after := d.move(ask())
			require.Equal(t, http.StatusTooManyRequests, status, name)
			require.Contains(t, message, "caller_bytes", name)
			require.Equal(t, "21", after, "200 are owed, and one byte must be left")
		}
	})
	t.Run("a layer that is larger than the burst goes through a full bucket", func(t *testing.T) {
		d, _ := newTransferAPI(t)
		body, length := send(2500)
		status, _, _ := d.move(upload("acme/a", body, length))
		require.Equal(t, http.StatusOK, status)
		_, _, after := d.move(download("acme/a"))
		require.Equal(t, "151", after)
	})
}

func TestRegistryTransfersOfAnOrgAndOfANodeHaveABudgetOfBytes(t *testing.T) {
	send := func(n int) (io.Reader, int64) { return bytes.NewReader(make([]byte, n)), int64(n) }
	t.Run("the callers of an org share the org's", func(t *testing.T) {
		d, _ := newTransferAPI(t)
		for n := range orgShare {
			body, length := send(1000)
			status, _, _ := d.move(upload("acme/"+strconv.Itoa(n), body, length))
			require.Equal(t, http.StatusOK, status)
		}
		status, message, _ := d.move(download("acme/other"))
		require.Equal(t, http.StatusTooManyRequests, status)
		require.Contains(t, message, "org_bytes")
		for _, token := range []string{"globex/other", "/platform", ""} {
			status, _, _ = d.move(download(token))
			require.Equal(t, http.StatusOK, status, token)
		}
	})
	t.Run("a node has its own", func(t *testing.T) {
		d, _ := newTransferAPI(t)
		ask := func(id string) *http.Request {
			r := download("acme/a")
			leaf := &x509.Certificate{URIs: []*url.URL{protocol.NodeSPIFFE("gpuaas.test", id)}}
			r.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{leaf}, VerifiedChains: [][]*x509.Certificate{
				{leaf},
			}}
			return r
		}
		for range 3 {
			status, _, _ := d.move(ask("n1"))
			require.Equal(t, http.StatusOK, status)
		}
		status, message, _ := d.move(ask("n1"))
		require.Equal(t, http.StatusTooManyRequests, status)
		require.Contains(t, message, "node_bytes")
		for _, r := range []*http.Request{ask("n2"), download("acme/a")} {
			status, _, _ = d.move(r)
			require.Equal(t, http.StatusOK, status)
		}
	})
}

// An operation without a body reads none: a request costs little, whatever comes with it.
func TestABodyThatAnOperationDoesNotTakeIsNotRead(t *testing.T) {
	d := newTestAPI(t, stubServer{})
	for _, path := range []string{"/api/v1/orgs", "/api/v1/trust/bundle"} {
		body := &countedBody{}
		r := httptest.NewRequest(http.MethodGet, path, body)
		r.Header.Set("Authorization", "Bearer "+goodToken)
		w := httptest.NewRecorder()
		d.ServeHTTP(w, r)
		require.Equal(t, http.StatusRequestEntityTooLarge, w.Code, path)
		require.LessOrEqual(t, body.read, 4<<10, path)
	}
}

// blocking is a handler whose requests stay under way until release is closed.
type blocking struct {
	StrictServerInterface
	entered chan struct{}
	release chan struct{}
}

func (b blocking) ListOrgs(context.Context, ListOrgsRequestObject) (ListOrgsResponseObject, error) {
	b.entered <- struct{}{}
	<-b.release
	return ListOrgs200JSONResponse{Items: []Org{}}, nil
}

func (b blocking) GetAppInstance(context.Context,
	GetAppInstanceRequestObject,
) (GetAppInstanceResponseObject, error) {
	b.entered <- struct{}{}
	<-b.release
	return nil, iam.ErrNotFound()
}

func (b blocking) GetAppInstanceLogs(context.Context,
	GetAppInstanceLogsRequestObject,
) (GetAppInstanceLogsResponseObject, error) {
	b.entered <- struct{}{}
	<-b.release
	return nil, iam.ErrNotFound()
}

func TestRequestsWatchersAndLogStreamsUnderWayAreBoundedForEachCaller(t *testing.T) {
	instance := "/api/v1/projects/" + someID + "/app-instances/" + someID
	for path, c := range map[string]struct {
		max    int
		budget string
	}{
		"/api/v1/orgs":                 {maxCallerRequests, "budget/caller_requests_at_once"},
		instance + "?after=1&wait=10s": {maxCallerWatchers, "budget/caller_watchers"},
		instance + "/logs":             {maxCallerLogStreams, "budget/caller_log_streams"},
	} {
		t.Run(c.budget, func(t *testing.T) {
			s := blocking{entered: make(chan struct{}), release: make(chan struct{})}
			d := newTestAPI(t, s)
			d.known = map[string]iam.Principal{"other": {Type: principal.User, ID: "other", OrgID: "other"}}
			a := ask{method: http.MethodGet, path: path}
			done := make(chan struct{})
			start := func(a ask) {
				go func() {
					res := d.do(t, a)
					_, _ = io.Copy(io.Discard, res.Body)
					_ = res.Body.Close()
					done <- struct{}{}
				}()
				<-s.entered
			}
			for range c.max {
				start(a)
			}
			p := problem(t, d.do(t, a), 429)
			require.Equal(t, "too_many_at_once", p.Code)
			require.Equal(t, c.budget, p.Errors[0].Pointer)
			other := a
			other.header = bearer("other")
			start(other)
			close(s.release)
			for range c.max + 1 {
				<-done
			}
			go func() { <-s.entered }()
			require.NotEqual(t, http.StatusTooManyRequests, d.status(t, a), "a released slot is free")
		})
	}
}

// What follows events stays open for an hour, whatever carries it.
func TestEveryFollowerOfEventsTakesAWatchersSlot(t *testing.T) {
	for _, operation := range []string{"streamEvents", "followEvents"} {
		require.Subset(t, slotsOfCaller(callerID{key: "a", org: "o"}, operation, false), []slot{
			{"caller_watchers", "a", maxCallerWatchers}, {"org_watchers", "o", maxOrgWatchers},
		}, operation)
	}
}

// Each is a stream to a node that stays open for as long as its caller likes.
func TestEveryStreamToAnAppTakesASlotOfItsOwn(t *testing.T) {
	for _, operation := range []string{"forwardAppInstancePort", "execInAppInstance", "copyAppInstanceFiles"} {
		require.Subset(t, slotsOfCaller(callerID{key: "a", org: "o"}, operation, false), []slot{
			{"caller_app_streams", "a", maxCallerAppStreams}, {"org_app_streams", "o", maxOrgAppStreams},
		}, operation)
	}
}

// However many callers an org has: together they leave slots to others.
func TestRequestsWatchersAndLogStreamsUnderWayAreBoundedForEachOrg(t *testing.T) {
	instance := "/api/v1/projects/" + someID + "/app-instances/" + someID
	for path, c := range map[string]struct {
		each, max int
		budget    string
	}{
		"/api/v1/orgs":                 {maxCallerRequests, maxOrgRequests, "budget/org_requests_at_once"},
		instance + "?after=1&wait=10s": {maxCallerWatchers, maxOrgWatchers, "budget/org_watchers"},
		instance + "/logs":             {maxCallerLogStreams, maxOrgLogStreams, "budget/org_log_streams"},
	} {
		t.Run(c.budget, func(t *testing.T) {
			s := blocking{entered: make(chan struct{}), release: make(chan struct{})}
			d := newTestAPI(t, s)
			d.known = map[string]iam.Principal{"other": {Type: principal.User, ID: "other", OrgID: "other"}}
			callers := c.max/c.each + 1
			for n := range callers {
				name := strconv.Itoa(n)
				d.known[name] = iam.Principal{Type: principal.User, ID: name, OrgID: "org"}
			}
			done := make(chan struct{})
			start := func(bearerOf string) {
				go func() {
					res := d.do(t, ask{method: http.MethodGet, path: path, header: bearer(bearerOf)})
					_, _ = io.Copy(io.Discard, res.Body)
					_ = res.Body.Close()
					done <- struct{}{}
				}()
				<-s.entered
			}
			for n := range c.max {
				start(strconv.Itoa(n / c.each))
			}
			p := problem(t, d.do(t, ask{method: http.MethodGet, path: path, header: bearer(strconv.Itoa(callers - 1))}), 429)
			require.Equal(t, "too_many_at_once", p.Code)
			require.Equal(t, c.budget, p.Errors[0].Pointer, "a caller of the org that has no slot itself")
			start("other")
			close(s.release)
			for range c.max + 1 {
				<-done
			}
		})
	}
}

func TestAddressesCountByWhatOneCustomerHas(t *testing.T) {
	for ip, want := range map[string][2]string{
		"192.0.2.7":        {"192.0.2.7", "192.0.2.0/24"},
		"::ffff:192.0.2.7": {"192.0.2.7", "192.0.2.0/24"},
		"2001:db8:1:2:3::": {"2001:db8:1:2::/64", "2001:db8:1::/48"},
		"fe80::1%eth0":     {"fe80::/64", "fe80::/48"},
		"@":                {"@", "@"},
	} {
		address, prefix := prefixes(ip)
		require.Equal(t, want, [2]string{address, prefix}, ip)
	}
}

func TestReadinessAsksTheDatabaseOnceASecond(t *testing.T) {
	asked := 0
	d := newTestAPI(t, struct{ StrictServerInterface }{&Server{Ready: func(context.Context) error {
		asked++
		return nil
	}}})
	for range 100 {
		require.Equal(t, http.StatusOK, d.status(t, ask{method: http.MethodGet, path: "/readyz"}))
	}
	require.Equal(t, 1, asked)
	d.now = d.now.Add(time.Second)
	d.status(t, ask{method: http.MethodGet, path: "/readyz"})
	require.Equal(t, 2, asked)
}
