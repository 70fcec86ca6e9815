# docker build --target proxy -t recap-proxy .
# docker run -p 127.0.0.1:8787:8787 -e RECAP_PROXY_KEY=... -v recap:/data recap-proxy
#
# In a container the proxy has to listen on every interface, and then it wants a key: clients send it as x-recap-key.
FROM python:3.12-slim AS base

RUN useradd --create-home --uid 10001 recap && install --directory --owner recap --mode 0700 /data
WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY proxy proxy
COPY graphstore graphstore
COPY proxy_model proxy_model
COPY migrations migrations
RUN pip install --no-cache-dir .
ENV RECAP_DB=/data/recap.db
VOLUME /data
ENTRYPOINT ["recap"]

FROM base AS worker
RUN pip install --no-cache-dir '.[attention]'
USER recap
CMD ["worker"]

# The last stage is what `docker build .` makes. Its worker is the other service: none is started here.
FROM base AS proxy
USER recap
ENV RECAP_HOST=0.0.0.0 RECAP_PORT=8787
EXPOSE 8787
CMD ["serve"]
