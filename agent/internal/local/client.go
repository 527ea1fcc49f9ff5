package local

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"

	"github.com/gpuaas/gpuaas/agent/internal/accept"
	"github.com/gpuaas/gpuaas/agent/internal/runtime"
	"github.com/gpuaas/gpuaas/pkg/fault"
)

// Client asks an agent on this machine.
type Client struct {
	socket string
	http   *http.Client
}

// NewClient asks through the socket at this path.
func NewClient(socket string) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}
	return &Client{socket: socket, http: &http.Client{Transport: &http.Transport{DialContext: dial}}}
}

// Close gives the connection back.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Status asks how the node is.
func (c *Client) Status(ctx context.Context) (Status, error) {
	return get[Status](ctx, c, "/v1/status")
}

// Workloads asks what runs.
func (c *Client) Workloads(ctx context.Context) ([]Workload, error) {
	return get[[]Workload](ctx, c, "/v1/workloads")
}

// Verify checks everything that is signed again.
func (c *Client) Verify(ctx context.Context) ([]accept.Check, error) {
	return get[[]accept.Check](ctx, c, "/v1/verify")
}

// Keys asks with which keys tenants log in to an account of the machine: lines of authorized_keys.
func (c *Client) Keys(ctx context.Context, user string) ([]string, error) {
	return get[[]string](ctx, c, "/v1/keys/"+url.PathEscape(user))
}

// Apply hands a signed document over.
func (c *Client) Apply(ctx context.Context, d Document) (Applied, error) {
	raw, err := json.Marshal(d)
	if err != nil {
		return Applied{}, err
	}
	body, err := c.do(ctx, http.MethodPost, "/v1/apply", bytes.NewReader(raw))
	return decode[Applied](body, err)
}

// ReleaseAccelerator takes a repaired accelerator out of quarantine.
func (c *Client) ReleaseAccelerator(ctx context.Context, id string) error {
	body, err := c.do(ctx, http.MethodPost, "/v1/accelerators/"+url.PathEscape(id)+"/release", nil)
	_, err = decode[struct{}](body, err)
	return err
}

// Images lists the images that the node has.
func (c *Client) Images(ctx context.Context) ([]runtime.Image, error) {
	return get[[]runtime.Image](ctx, c, "/v1/images")
}

// PinImage keeps an image where space is short, or ends that.
func (c *Client) PinImage(ctx context.Context, p Pin) error {
	raw, err := json.Marshal(p)
	if err != nil {
		return err
	}
	body, err := c.do(ctx, http.MethodPost, "/v1/images/pin", bytes.NewReader(raw))
	_, err = decode[Pin](body, err)
	return err
}

// LogsQuery says which log and how much of it.
type LogsQuery struct {
	MemberID  string
	Service   string
	TailLines int
	Follow    bool
}

// Logs streams a workload's log; the caller closes it.
func (c *Client) Logs(ctx context.Context, q LogsQuery) (io.ReadCloser, error) {
	v := url.Values{"service": {q.Service}, "tail": {strconv.Itoa(q.TailLines)}, "follow": {strconv.FormatBool(q.Follow)}}
	return c.do(ctx, http.MethodGet, "/v1/logs/"+url.PathEscape(q.MemberID)+"?"+v.Encode(), nil)
}

func get[T any](ctx context.Context, c *Client, path string) (T, error) {
	body, err := c.do(ctx, http.MethodGet, path, nil)
	return decode[T](body, err)
}

func decode[T any](body io.ReadCloser, err error) (T, error) {
	var out T
	if err != nil {
		return out, err
	}
	defer func() { _ = body.Close() }()
	return out, json.NewDecoder(body).Decode(&out)
}

func (c *Client) do(ctx context.Context, method, path string, body io.Reader) (io.ReadCloser, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, body)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fault.New(fault.Unavailable, codeAgentAway,
			fmt.Sprintf("No agent answers on %s. Is gpuaas-agent running, and may you open its socket?", c.socket), err)
	}
	if resp.StatusCode < http.StatusBadRequest {
		return resp.Body, nil
	}
	defer func() { _ = resp.Body.Close() }()
	var p problem
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxDocumentBytes)).Decode(&p); err != nil {
		return nil, fault.New(fault.Internal, codeAgentAnswer, "The agent's answer cannot be read.", err)
	}
	kind := fault.Internal
	switch resp.StatusCode {
	case http.StatusBadRequest:
		kind = fault.Malformed
	case http.StatusConflict:
		kind = fault.Conflict
	case http.StatusNotFound:
		kind = fault.NotFound
	case http.StatusServiceUnavailable:
		kind = fault.Unavailable
	}
	return nil, fault.New(kind, p.Code, p.Detail, nil)
}
